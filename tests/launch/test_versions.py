"""Names of versions: a run folder, a step, the best, the last, an export."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import config_to_json, load_config
from launch.versions import find_version
from tests.launch.small_run import write_best, write_checkpoint


@pytest.fixture
def run(request_path: Path) -> Path:
    """A run that has been moved, with checkpoints of steps 3 and 12, the best and an export."""
    folder = request_path.parent / "moved"
    write_checkpoint(folder, 3)
    write_checkpoint(folder, 12)
    write_best(folder, 9)
    (folder / "checkpoints" / "14.orbax-checkpoint-tmp").mkdir()
    (folder / "export" / "adapter").mkdir(parents=True)
    (folder / "export" / "config.json").write_text('{"model_type": "gemma3_text"}')
    config = config_to_json(load_config(request_path))
    (folder / "config.json").write_text(config, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("moved", "checkpoints/best"),
        ("moved@best", "checkpoints/best"),
        ("moved@last", "checkpoints/12"),
        ("moved@3", "checkpoints/3"),
        ("moved/export", "export"),
    ],
)
def test_a_version_has_one_name_in_all_commands(run: Path, name: str, adapter: str):
    found = find_version(name)
    assert (found.run, found.adapter) == (run, run / adapter)
    config = found.config([("eval.temperature", "1.0")])
    assert (config.run.dir, config.run.name) == (str(run.parent), "moved")
    assert config.eval.temperature == 1


def test_a_name_without_a_version_is_refused(run: Path):
    for name, told in (
        ("moved@4", "moved has no checkpoint 4; there are 3, 12, best, last"),
        ("movd@3", "no folder .*/movd; nearest: .*/moved"),
        ("moved/checkpoints", "is no run folder and no export in one"),
        ("moved@first", "no folder .*/moved@first"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=told):
            find_version(name)
    # Without a validation the last version is meant.
    (run / "checkpoints" / "best" / "adapter.safetensors").unlink()
    assert find_version("moved").adapter == run / "checkpoints" / "12"
