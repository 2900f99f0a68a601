"""Resolves the relative paths of a configuration.

A submitted job runs in a temporary copy of the working directory, so paths become absolute early.
"""

from __future__ import annotations

import os
from pathlib import Path

from configs.base import HUB_PREFIXES
from configs.schema import Config, Source

HOME_VARIABLE = "GEMMA_GRPO_HOME"
"""Environment variable of the base folder of relative paths."""


def home() -> Path:
    """The base folder of relative paths: $GEMMA_GRPO_HOME, else the current directory."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.cwd()).absolute()


def with_absolute_paths(config: Config) -> Config:
    """The configuration with absolute paths of run folder, model, adapters and local data files.

    Hub datasets and hub model handles are unchanged; `~` is the user's home.
    """
    data, model, evaluation = config.data, config.model, config.eval
    splits = {name: _source(getattr(data, name)) for name in ("train", "validation", "test")}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": _absolute(config.run.dir)}),
            "model": model.model_copy(
                update={"path": _path(model.path), "tokenizer": _path(model.tokenizer)}
            ),
            "lora": config.lora.model_copy(update={"start": _path(config.lora.start)}),
            "learner": config.learner.model_copy(update={"teacher": _path(config.learner.teacher)}),
            "sft": config.sft.model_copy(update={"train": _source(config.sft.train)}),
            "data": data.model_copy(
                update={**splits, "mixture": tuple(map(_source, data.mixture))}
            ),
            "eval": evaluation.model_copy(update={"sets": tuple(map(_source, evaluation.sets))}),
        }
    )


def is_handle(path: str) -> bool:
    """Whether `path` is a hub model handle, not a folder."""
    return path.startswith(HUB_PREFIXES)


def _source(source: Source | None) -> Source | None:
    if source is None or not source.is_file:
        return source
    return source.model_copy(update={"path": _absolute(source.path)})


def _path(path: str | None) -> str | None:
    return path if path is None or is_handle(path) else _absolute(path)


def _absolute(path: str) -> str:
    # normpath, not resolve: the run folder may be a link whose target changes between resumes.
    return os.path.normpath(home() / Path(path).expanduser())
