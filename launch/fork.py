"""Begins a run from a checkpoint of another one: its adapter, with the optimizer's state.

The checkpoint is copied to `start/` of the new run folder, because the other run may delete it, and
is the initial adapter of the new run (`lora.start`). Steps, data order, learning rate and seed are
the new run's own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from configs.base import nearest_hint
from configs.schema import Config
from launch.versions import find_checkpoint, split_version
from pipeline.run.checkpoint_files import BEST, CheckpointFiles, best_version, read_checkpoints
from pipeline.run.run_folder import RunFolder


def forked(config: Config) -> Config:
    """The configuration with the checkpoint that the run forks from as its initial adapter.

    Before the run begins this is the other run's checkpoint, then the copy of it.

    Raises:
        FileNotFoundError: if there is no such run, or no such checkpoint.
        ValueError: if the setting excludes `lora.start`.
    """
    if config.run.fork is None:
        return config
    folder, given = RunFolder.of(config), config.lora.start
    if given is not None and Path(given).parent.name != folder.start.name:
        raise ValueError(
            "lora.start: run.fork gives the initial adapter, with the optimizer's state; remove one"
        )
    return _started(config, _copied(folder) or _checkpoint(config.run.fork))


def copy_start(config: Config) -> Config:
    """Copies the checkpoint that the run forks from into the run folder, which is locked.

    Returns:
        The configuration with the copy as its initial adapter.
    """
    if config.run.fork is None:
        return config
    folder = RunFolder.of(config)
    copy = _copied(folder)
    if copy is None:
        checkpoint = _checkpoint(config.run.fork)
        copy = folder.start / checkpoint.name
        shutil.rmtree(folder.start, ignore_errors=True)  # of a process that was killed
        shutil.copytree(checkpoint, copy)
    return _started(config, copy)


def origin(config: Config) -> CheckpointFiles | None:
    """The checkpoint that the run forks from, as `forked` found it; None: no fork, or refused."""
    if config.run.fork is None or config.lora.start is None:
        return None
    start = Path(config.lora.start)
    return next((one for one in read_checkpoints(start.parent) if one.path == start), None)


def check_base(config: Config, base: str) -> None:
    """Refuses to fork a run of another base.

    Raises:
        ValueError: if the other run's is another one.
    """
    checkpoint = origin(config)
    if checkpoint is not None and checkpoint.provenance.get("base") not in {None, base}:
        raise ValueError(
            f"run.fork: {config.run.fork} was trained on other weights than those of model.path = "
            f"{config.model.path}; give its model.path"
        )


def _started(config: Config, start: Path) -> Config:
    lora = config.lora.model_copy(update={"start": str(start)})
    return config.model_copy(update={"lora": lora})


def _copied(folder: RunFolder) -> Path | None:
    """The copy of the checkpoint in the folder of a run that has begun; None: it has not."""
    return next(folder.start.glob("*"), None) if folder.holds_run else None


def _checkpoint(fork: str) -> Path:
    """The folder of the checkpoint, which has the optimizer's state.

    Raises:
        FileNotFoundError: naming the run's checkpoints.
    """
    run, which = split_version(fork)
    if not run.is_dir():
        raise FileNotFoundError(f"run.fork: no run folder {run}{nearest_hint(run)}")
    best = best_version(RunFolder(run).checkpoints)
    if which in {None, BEST} and best is not None:
        which = str(best)
    try:
        return find_checkpoint(run, which)
    except FileNotFoundError as error:
        kept = f"; lora.start = {run / 'checkpoints' / BEST} begins from the best adapter alone"
        raise FileNotFoundError(f"run.fork: {error}{kept if best is not None else ''}") from None
