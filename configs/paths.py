"""Where relative paths in a configuration start.

A submitted job runs in a temporary copy of the working directory, so paths are made absolute once.
"""

from __future__ import annotations

import os
from pathlib import Path

from configs.schema import Config, Source

HOME_VARIABLE = "GEMMA_GRPO_HOME"
"""Environment variable that names the folder where relative paths start."""


def home() -> Path:
    """The folder where relative paths start: $GEMMA_GRPO_HOME, else the current directory."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.cwd()).absolute()


def with_absolute_paths(config: Config) -> Config:
    """The same configuration with `run.dir`, `model.path` and local data files absolute.

    Names of hub datasets stay as they are; `~` is the user's home.
    """
    data = config.data
    sources = {
        name: source.model_copy(update={"path": _absolute(source.path)})
        for name in ("train", "validation", "test")
        if isinstance(source := getattr(data, name), Source) and source.is_file
    }
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": _absolute(config.run.dir)}),
            "model": config.model.model_copy(update={"path": _absolute(config.model.path)}),
            "data": data.model_copy(update=sources),
        }
    )


def _absolute(path: str) -> str:
    # normpath, not resolve: the run folder may be a link that moves between resumes.
    return os.path.normpath(home() / Path(path).expanduser())
