"""Begins a run from a checkpoint of another one: its adapter, with the optimizer's state.

The checkpoint is copied to `start/` of the new run folder, because the other run may delete it, and
is the initial adapter of the new run (`lora.start`). Steps, data order, learning rate and seed are
the new run's own.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from configs.base import nearest_hint
from configs.resume import change_lines
from configs.schema import Config
from pipeline.run.checkpoint_files import CheckpointFiles, read_checkpoints
from pipeline.run.run_folder import RunFolder

_SHAPE = ("rank", "alpha", "scaling", "targets")
"""Settings in `lora` that a fork cannot change."""
_FORK = re.compile(r"(?P<run>.+)@(?P<step>\d+)")


def forked(config: Config) -> Config:
    """The configuration with the checkpoint that the run forks from as its initial adapter.

    Before the run begins this is the other run's checkpoint, then the copy of it.

    Raises:
        FileNotFoundError: if there is no such run.
        ValueError: if it has no such checkpoint, or the setting excludes `lora.start`.
    """
    if config.run.fork is None:
        return config
    source, step = _source(config.run.fork)
    copy = RunFolder.of(config).start / str(step)
    given = config.lora.start
    if given is not None and Path(given).parts[-2:] != copy.parts[-2:]:
        raise ValueError(
            "lora.start: run.fork gives the initial adapter, with the optimizer's state; remove one"
        )
    if copy.is_dir():
        return _started(config, copy)
    checkpoint = _checkpoint(source, step)
    _check_shape(config, RunFolder(source))
    return _started(config, checkpoint.path)


def copy_start(config: Config) -> Config:
    """Copies the checkpoint that the run forks from into the run folder, which is locked.

    Returns:
        The configuration with the copy as its initial adapter.
    """
    if config.run.fork is None:
        return config
    source, step = _source(config.run.fork)
    copy = RunFolder.of(config).start / str(step)
    if not copy.is_dir():
        partial = copy.with_name(f".{step}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(_checkpoint(source, step).path, partial)
        partial.rename(copy)
    return _started(config, copy)


def origin(config: Config) -> CheckpointFiles | None:
    """The checkpoint that the run forks from, as `forked` found it; None: no fork, or refused."""
    if config.run.fork is None or config.lora.start is None:
        return None
    start = Path(config.lora.start)
    return next((one for one in read_checkpoints(start.parent) if one.path == start), None)


def check_base(config: Config, base: str) -> None:
    """Refuses to fork a run of another base.

    Args:
        config: of the new run.
        base: fingerprint of its base's weights.

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


def _check_shape(config: Config, run: RunFolder) -> None:
    """Compares the shape and the scale of the adapter with those of the other run."""
    theirs = run.saved_config["lora"] if run.holds_run else {}
    ours = config.lora.model_dump(mode="json")
    changes = [
        (f"lora.{key}", theirs[key], ours[key])
        for key in _SHAPE
        if key in theirs and theirs[key] != ours[key]
    ]
    if changes:
        raise ValueError(
            f"run.fork: the adapter of {run.path} has another shape or scale; give the settings "
            f"of that run:\n{change_lines(changes)}"
        )


def _source(fork: str) -> tuple[Path, int]:
    match = _FORK.fullmatch(fork)
    assert match is not None, fork  # the schema refuses others
    return Path(match["run"]), int(match["step"])


def _checkpoint(run: Path, step: int) -> CheckpointFiles:
    if not run.is_dir():
        raise FileNotFoundError(f"run.fork: no run folder {run}{nearest_hint(run)}")
    found = read_checkpoints(RunFolder(run).checkpoints)
    one = next((one for one in found if one.step == step), None)
    if one is None:
        steps = ", ".join(str(one.step) for one in found)
        existing = f"there are {steps}" if steps else "there is none"
        raise ValueError(f"run.fork: {run} has no checkpoint of step {step}; {existing}")
    return one
