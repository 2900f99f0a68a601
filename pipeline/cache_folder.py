"""Where what can be made again is kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

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
