"""Where what can be made again is kept between runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    """Replaces a file of such a folder, atomically; one that cannot be written to keeps nothing."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError:
        return
