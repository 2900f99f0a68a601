"""The folder that a rehearsal works in: beside the run folders, and gone afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from configs.schema import Config, Wandb
from pipeline.run.run_folder import RunFolder

_PREFIX = ".rehearsal-"


def rehearsed(config: Config) -> Config:
    """The same run in a folder of its own, on the file system that the run will be on; no W&B."""
    run = config.run.model_copy(update={"name": f"{_PREFIX}{config.run.name}"})
    return config.model_copy(update={"run": run, "wandb": Wandb(mode="disabled")})


@contextmanager
def scratch(config: Config) -> Iterator[Path]:
    """The empty folder of a rehearsal, held against others; all of it is gone afterwards.

    What a killed rehearsal has left in it is deleted first. Folders above it that were made for it
    are gone, too.

    Args:
        config: what `rehearsed` returned.

    Raises:
        ValueError: if another process is at work in it.
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
        # It was there already, if a killed rehearsal has left it.
        with suppress(OSError):
            folder.path.rmdir()


def _empty(folder: Path) -> None:
    """Deletes all but the lock."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != ".lock":
            path.unlink()
