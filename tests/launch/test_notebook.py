"""The notebook for Kaggle and Colab: what is committed, and its execution on the demo."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "launch/notebooks/gemma_grpo.ipynb"
# The install cell finds an environment that is complete: `test_bootstrap.py` has the installation.
READY = (".python", ".runtime", ".package")
PARAMETERS = """
SOURCE, WHEELS, PROJECT = {source!r}, None, {project!r}
CONFIG, RUNS, NAME = "configs/demo.toml", "runs", "small"
SETTINGS = [
    *("--budget.steps", "2", "--eval.every_steps", "2", "--checkpoint.every_steps", "2"),
    *("--data.validation.limit", "16", "--data.test.limit", "16", "--wandb.mode", "offline"),
]
"""


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_no_outputs_are_committed_and_one_cell_has_the_parameters(
    notebook: nbformat.NotebookNode,
) -> None:
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert {(len(cell.outputs), cell.execution_count) for cell in cells} == {(0, None)}
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == cells[:1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project's sources with this test's environment."""
    project = tmp_path / "project"
    project.mkdir()
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in {"runs", "wandb", "wheelhouse"}:
            (project / path.name).symlink_to(path)
    venv = project / ".venv"
    venv.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (venv / name).symlink_to(Path(sys.prefix) / name)
    for name in READY:
        (venv / name).touch()
    return project


@pytest.mark.slow
@pytest.mark.ray
def test_the_notebook_trains_evaluates_and_exports_the_demo(
    notebook: nbformat.NotebookNode,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, modules = tmp_path / "work", tmp_path / "modules"
    work.mkdir()
    modules.mkdir()
    (modules / "kaggle_secrets.py").write_text(
        "class UserSecretsClient:\n    def get_secret(self, name):\n        return f'my {name}'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    (parameters,) = (cell for cell in notebook.cells if cell.id == "parameters")
    parameters.source = PARAMETERS.format(source=str(ROOT), project=str(project))
    token = nbformat.v4.new_code_cell('print(os.environ["WANDB_API_KEY"])', id="token")
    notebook.cells.append(token)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(work)}}
    ).execute()
    cells = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    shown = {name: "".join(one.get("text", "") for one in cells[name]) for name in cells}
    assert shown["token"] == "my WANDB_API_KEY\n"
    assert shown["install"] == ""
    assert shown["doctor"]
    assert shown["plan"].startswith("plan of small")
    assert f"finished: {work}/runs/small" in shown["watch"]
    summary = json.loads((work / "runs/small/summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 2
    assert re.search(r"^test: \d+\.\d% -> \d+\.\d%", shown["evaluate"], re.MULTILINE)
    assert (work / "runs/small-export/config.json").is_file()
    assert "srcdoc" in cells["report"][-1].data["text/html"]
