"""The cache shared between runs, for files that can be recomputed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.run.record_files import DamagedFileError, read_json, write_json

CACHE_VARIABLE = "GEMMA_GRPO_CACHE"
"""Environment variable of the cache folder."""


def cache_folder(kind: str) -> Path:
    """The cache folder of one kind of files, which may not exist yet.

    It is in $GEMMA_GRPO_CACHE, else in $XDG_CACHE_HOME/gemma-grpo, else in ~/.cache/gemma-grpo.
    """
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser().absolute() / kind
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "gemma-grpo" / kind


def write_cached_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a cache file atomically; does nothing if the folder is not writable."""
    own = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(own, content)
        own.replace(path)
    except OSError:
        return


def read_cached_json(path: Path) -> dict[str, Any] | None:
    """Reads a file of `write_cached_json`; None if it is missing or damaged."""
    try:
        return read_json(path)
    except (OSError, DamagedFileError):
        return None
