"""The user's modules and files of reward functions in a submitted job."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launch import source
from launch.source import copy_user_files
from rewards.resolve import uploaded

FILES = {
    "my_rewards.py": "import helpers\nfrom rewards.base import score\n",
    "helpers.py": "def late():\n    import lazy.inner.deep\n",
    "lazy/inner/deep.py": "def broken(:\n",
    "words.txt": "not a module",
    "rewards.py": "",  # never imported: the project has a package of this name
    "rewards/mine.py": "",
    ".venv/lib/site-packages/numpy/__init__.py": "",
    "env/pyvenv.cfg": "",
    "env/lib/numpy/__init__.py": "",
    "other/own.py": "import near_it, helpers\n",
    "other/parts/one.py": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def copies(folder: Path, *functions: str) -> set[str]:
    root = folder / ".upload"
    shutil.rmtree(root, ignore_errors=True)
    copy_user_files(functions, folder, root)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


HERE = {"helpers.py", "lazy/inner/deep.py", "my_rewards.py", "other/own.py", "other/parts/one.py"}


def test_the_python_files_of_a_user_are_uploaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert copies(folder, "rewards.format:well_formed") == set()
    assert copies(folder, "my_rewards:near", "rewards.format:well_formed") == HERE
    # Those beside a reward file travel to their own folder.
    functions = [f"{folder}/other/own.py:f", f"{folder}/other/own.py:g", "/gone/gone.py:f"]
    own = uploaded(folder / "other", Path())
    assert copies(folder, *functions) == HERE | {f"{own}/own.py", f"{own}/parts/one.py"}
    monkeypatch.setattr(source, "_MOST_FILES", 4)
    with pytest.raises(ValueError, match="more than 4 Python files"):
        copies(folder, "my_rewards:near")
