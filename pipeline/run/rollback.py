"""Makes a run continue from an earlier checkpoint; what came later is set aside, not deleted."""

from __future__ import annotations

from pathlib import Path

from pipeline.contracts.checkpoint_files import BEST, best_version, read_checkpoints
from pipeline.contracts.record_files import move_to_superseded
from pipeline.run.run_folder import RunFolder

ROLLED_BACK = "rolled_back"
"""Journal event: the user has made the run continue from an earlier checkpoint."""


def check_rollback(folder: RunFolder, step: int) -> None:
    """Checks that the run has a usable checkpoint of this step, and that no process runs it.

    Raises:
        ValueError: with the checkpoints that there are.
        DamagedFileError: if a record that a resume needs is damaged.
    """
    if folder.is_locked:
        raise ValueError(
            f"{folder.path}: a process runs this run; end it first, with Ctrl-C, "
            "SIGTERM or ray job stop"
        )
    found = read_checkpoints(folder.checkpoints)
    usable = [str(one.step) for one in found if one.problem is None]
    if str(step) not in usable:
        problem = next((one.problem for one in found if one.step == step), None)
        why = f"its checkpoint of step {step} is damaged: {problem}" if problem else "no such one"
        existing = f"there are {', '.join(usable)}" if usable else "there is none"
        raise ValueError(f"{folder.path}: checkpoint {step}: {why}; {existing}")
    for _ in folder.entries():
        pass
    folder.metrics  # noqa: B018  # raises


def roll_back(folder: RunFolder, step: int) -> list[Path]:
    """Makes the run continue from its checkpoint of this step; the folder is locked by the caller.

    A process that is killed meanwhile leaves a run that resumes from this checkpoint.

    Returns:
        The folders in `superseded/` with what came later.
    """
    later = [one.path for one in read_checkpoints(folder.checkpoints) if one.step > step]
    if (best_version(folder.checkpoints) or 0) > step:
        later.append(folder.checkpoints / BEST)
    moved = [move_to_superseded(folder.path, later), folder.rewind_to(step)]
    folder.journal(ROLLED_BACK, step=step)
    return [path for path in moved if path is not None]
