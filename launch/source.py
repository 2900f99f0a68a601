"""The project's source: its version, and what a job has of it and of the user's reward functions.

Of the user these are the Python files of the current folder, and of a function `file.py:name` those
of the file's folder. The dry run among the copies reports whether the functions can be imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from configs.base import REWARD_FILE
from rewards.resolve import uploaded

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("actors", "configs", "launch", "pipeline", "rewards")
"""The project's packages."""
_MOST_FILES = 2000


def code_version() -> str:
    """Version of the package and hash of its sources: `0.1.0+3f2a91c0d4e5`."""
    version, digest = "", hashlib.sha256()
    with suppress(metadata.PackageNotFoundError):  # run from the sources
        version = f"{metadata.version('gemma-grpo')}+"
    for package in PACKAGES:
        for path in sorted((PROJECT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(PROJECT).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return version + digest.hexdigest()[:12]


def copy_source(upload: Path) -> None:
    """Copies the project's source and presets."""
    for package in PACKAGES:
        for pattern in ("*.py", "*.toml"):
            for file in (PROJECT / package).rglob(pattern):
                _copy(file, upload / file.relative_to(PROJECT))


def copy_user_files(functions: Collection[str], folder: Path, upload: Path) -> None:
    """Copies what reward functions may import; nothing for those of the project.

    `folder` is the current one. The dry run reports what is missing.

    Raises:
        ValueError: if a folder has too many Python files.
    """
    places = {function.rpartition(":")[0] for function in functions}
    own = {place for place in places if place.partition(".")[0] not in PACKAGES}
    for file in _python_files(folder) if own else ():
        relative = file.relative_to(folder)
        if relative.parts[0].removesuffix(".py") not in PACKAGES:
            _copy(file, upload / relative)
    for parent in {Path(place).parent for place in own if place.endswith(REWARD_FILE)}:
        for file in _python_files(parent):
            _copy(file, uploaded(file, upload))


def _python_files(folder: Path) -> list[Path]:
    """Python files below a folder, without hidden folders and environments."""
    found = list[Path]()
    for path, folders, files in os.walk(folder):
        here = Path(path)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not (here / name / "pyvenv.cfg").exists()
        ]
        found += [here / name for name in files if name.endswith(".py")]
        if len(found) > _MOST_FILES:
            raise ValueError(
                f"rewards.functions: {folder} has more than {_MOST_FILES} Python files, and all "
                "would be uploaded; put the reward functions into a folder of their own, and "
                "submit from a folder with less"
            )
    return found


def _copy(file: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)
