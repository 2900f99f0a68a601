"""The cache between runs: files that can be made again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.contracts.record_files import DamagedFileError, read_json, write_json

CACHE_VARIABLE = "GEMMA_GRPO_CACHE"
"""Environment variable that names the folder."""


def cache_folder(kind: str) -> Path:
    """The folder of one kind of such files, which need not exist yet.

    Below $GEMMA_GRPO_CACHE, else `gemma-grpo` in $XDG_CACHE_HOME, else in `~/.cache`.
    """
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser().absolute() / kind
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "gemma-grpo" / kind


def keep_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a file of the cache, atomically; does nothing where the folder is not writable."""
    own = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(own, content)
        own.replace(path)
    except OSError:
        return


def kept_json(path: Path) -> dict[str, Any] | None:
    """What `keep_json` wrote; None if the file is missing or damaged."""
    try:
        return read_json(path)
    except (OSError, DamagedFileError):
        return None
