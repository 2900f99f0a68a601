"""Where a process of a run continues, and what it records of its start."""

from __future__ import annotations

import os
from collections.abc import Mapping

from configs.resume import (
    Change,
    altering_changes,
    change_lines,
    code_changes,
    hardware_changes,
    is_reward_change,
)
from configs.schema import Config
from launch.exits import say
from launch.flags import RESTARTED_WHY
from launch.preparation import Prepared
from pipeline.budget import Budget, replaces_budget
from pipeline.clock import Clock
from pipeline.progress import Progress
from pipeline.run.history import (
    RESTARTED,
    REWARDS_CHANGED,
    SETTINGS_CHANGED,
    provenance,
)
from pipeline.run.run_folder import RunFolder
from pipeline.types import Restored

_NOTABLE_WAIT_S = 1.0
"""Shorter waits for devices are not journaled: free devices are reserved sooner."""


def check_restored(restored: Restored, folder: RunFolder) -> None:
    """Refuses to start a run anew that has checkpoints elsewhere.

    Raises:
        ValueError: if the journal lists checkpoints and the learner finds none.
    """
    listed = [entry["step"] for entry in folder.valid_entries("checkpoint")]
    if restored.meta is None and listed:
        raise ValueError(
            f"the journal in {folder.path} lists checkpoints up to step {max(listed)}, and the "
            f"learner finds none in {restored.where}; nothing was changed. Put the checkpoints "
            "back, or run the learner where they are; --run.name starts another run"
        )


def resume(restored: Restored, folder: RunFolder) -> tuple[Progress, int | None]:
    """Resumes from the newest checkpoint; later steps are trained again."""
    progress, resumed_from = Progress(), None
    if restored.meta is not None:
        progress = Progress.of_meta(restored.meta)
        resumed_from = progress.step
        say(f"resuming after step {progress.step}")
    folder.rewind_to(progress.step)
    return progress, resumed_from


def record_start(prepared: Prepared, clock: Clock, *, step: int) -> list[Change]:
    """Records configuration, budget and waiting times, once it is known that the run can continue.

    Returns which rewards have changed since the last start.

    Recorded earlier, a refused `--extend` would be added a second time by the same command.
    """
    config, folder, more = prepared.config, prepared.folder, prepared.extend
    changes: list[Change] = []
    if folder.holds_run:  # with the configuration of its last start, which `create` replaces
        if replaces_budget(config, folder):
            folder.journal("budget", step=step, **vars(Budget.given(config.budget)))
        changes = record_changes(folder, config, prepared.reward_code, step=step)
    folder.create(config)
    if why := os.environ.get(RESTARTED_WHY):
        folder.journal(RESTARTED, why=why)
    if more is not None:
        folder.journal("extended", step=step, steps=more.steps, time_s=more.time_s)
    if clock.waited_s >= _NOTABLE_WAIT_S:
        folder.journal("waited_for_devices", seconds=clock.waited_s)
    return changes


def record_changes(
    folder: RunFolder, config: Config, code: Mapping[str, str], *, step: int
) -> list[Change]:
    """Journals and prints what a resume changes; before `create` replaces the configuration.

    Returns:
        The changes of rewards, which are not printed.
    """
    old, new = folder.saved_config, config.model_dump(mode="json")
    known = provenance(folder.entries()).get("rewards", {})
    altering = altering_changes(old, new)
    rewards = [one for one in altering if is_reward_change(one)] + code_changes(known, code)
    accepted = [one for one in altering if not is_reward_change(one)]
    hardware = hardware_changes(old, new)
    told = {
        "hardware_changed": f"other devices or sizes from step {step + 1} on; the results equal "
        "those of the former ones up to rounding",
        SETTINGS_CHANGED: f"from step {step + 1} on",
        REWARDS_CHANGED: "",
    }
    for (event, what), changes in zip(told.items(), (hardware, accepted, rewards), strict=True):
        if changes:  # not `step`: a resume from an earlier step does not bring the old ones back
            folder.journal(event, after_step=step, changes=changes)
            if what:
                say(f"{what}:\n{change_lines(changes)}")
    return rewards
