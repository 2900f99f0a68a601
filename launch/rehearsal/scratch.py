"""Temporary run folder of a rehearsal, beside the run folders and deleted at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from configs.schema import Config, Wandb
from pipeline.run.run_folder import RunFolder

_PREFIX = ".rehearsal-"


def rehearsal_config(config: Config) -> Config:
    """Returns the configuration with a temporary folder on the same file system, without W&B."""
    run = config.run.model_copy(update={"name": f"{_PREFIX}{config.run.name}"})
    return config.model_copy(update={"run": run, "wandb": Wandb(mode="disabled")})


@contextmanager
def temporary_run_folder(config: Config) -> Iterator[Path]:
    """Locks an empty temporary run folder for the block; deletes it and its new parents afterwards.

    Leftovers of a killed rehearsal are deleted first.

    Args:
        config: from `rehearsal_config`.

    Raises:
        ValueError: if another process uses the folder.
    """
    folder = RunFolder.of(config)
    try:
        with folder.held():
            _empty(folder.path)
            try:
                yield folder.path
            finally:
                _empty(folder.path)
    finally:
        # The lock removes only a folder that it made, not one that a killed rehearsal left.
        with suppress(OSError):
            folder.path.rmdir()


def _empty(folder: Path) -> None:
    """Deletes everything but the lock file."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != ".lock":
            path.unlink()
