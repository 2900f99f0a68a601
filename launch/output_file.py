"""A file that a flag names: looked at before the work, written after it."""

from __future__ import annotations

import os
from pathlib import Path

from configs.base import scheme_problem
from configs.paths import home


def output_file(flag: str, file: str) -> Path:
    """Where the file is, read as paths in a configuration are; what is there stays as it is.

    Raises:
        ValueError: if it cannot be written.
    """
    path = home() / Path(file).expanduser()
    obstacle = scheme_problem(file) or _obstacle(path)
    if obstacle is not None:
        raise ValueError(f"command line: {flag}: {obstacle}")
    return path


def _obstacle(path: Path) -> str | None:
    try:
        if path.is_dir():
            return f"{path} is a folder; a file is wanted"
        if not path.parent.is_dir():
            return f"no folder {path.parent}"
        if path.exists():
            # Not opened: it may be a pipe, whose reader would take that for the end.
            return None if os.access(path, os.W_OK) else f"{path} cannot be written"
        path.touch()
        path.resolve().unlink()
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return None
