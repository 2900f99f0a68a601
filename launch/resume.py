"""Where a process of a run continues, and what it records of its start."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from configs.resume import Change, change_lines, hardware_changes, reward_changes
from configs.schema import Config
from launch.exits import say
from launch.flags import RESTARTED_WHY
from launch.preparation import Prepared
from pipeline.contracts.adapters import Restored
from pipeline.contracts.clock import Clock
from pipeline.contracts.progress import Progress
from pipeline.contracts.steering import REWARDS_CHANGED
from pipeline.control.budget import Budget, replaces_budget
from pipeline.plan.size_controller import SizeController
from pipeline.run.history import RESTARTED, REWARDS, provenance
from pipeline.run.run_folder import RunFolder

_NOTABLE_WAIT_S = 1.0
"""Shorter waits for devices are not journaled: free devices are reserved sooner."""


def check_restored(restored: Restored, folder: RunFolder) -> None:
    """Refuses to start a run anew that has checkpoints elsewhere.

    Raises:
        ValueError: if the journal lists checkpoints and the learner finds none, or the other way.
    """
    listed, found = _last_checkpoint(folder), restored.meta
    if found is None and listed is not None:
        raise ValueError(
            f"the journal in {folder.path} on host {socket.gethostname()} lists checkpoints up to "
            f"step {listed}, and the learner finds none in {restored.where}; nothing was changed. "
            "Put the checkpoints back, or run the learner where they are; --run.name starts "
            "another run"
        )
    lines = sum(1 for _ in folder.entries())
    if found is not None and lines < found["journal_lines"]:
        raise ValueError(
            f"the learner finds a checkpoint of step {found['step']} in {restored.where}, when "
            f"the journal had {found['journal_lines']} lines; in {folder.path} on host "
            f"{socket.gethostname()} it has {lines}: it has lost its end, or is of another run; "
            "nothing was changed. Put the run folder back, or start another run with --run.name"
        )


def _last_checkpoint(folder: RunFolder) -> int | None:
    """The step of the newest checkpoint that the journal lists."""
    return max((entry["step"] for entry in folder.valid_entries("checkpoint")), default=None)


def resume(
    restored: Restored, folder: RunFolder, sizes: SizeController
) -> tuple[Progress, int | None]:
    """Resumes from the newest usable checkpoint; later steps are trained again."""
    for line in restored.damaged:
        folder.journal("checkpoint_damaged", what=line)
        say(line)
    progress, resumed_from = Progress(), None
    if restored.meta is not None:
        sizes.resume(restored.meta)
        progress = Progress.of_meta(restored.meta)
        resumed_from = progress.step
        say(f"resuming after step {progress.step}")
    listed = _last_checkpoint(folder)
    if listed is not None and listed > progress.step and not restored.damaged:
        folder.journal("checkpoint_lost", step=progress.step, lost=listed, where=restored.where)
        say(f"the checkpoint of step {listed} is gone from {restored.where}")
    recorded = {row["step"] for row in folder.metrics}
    missing = [step for step in range(1, progress.step + 1) if step not in recorded]
    if missing:
        folder.journal("metrics_lost", step=progress.step, steps=missing)
        say(
            f"metrics.jsonl lacks {len(missing)} of {progress.step} steps, the first is "
            f"{missing[0]}; step times are measured again"
        )
    superseded = folder.rewind_to(progress.step)
    if superseded is not None:
        say(f"records of later steps are in {superseded}")
    return progress, resumed_from


def record_start(prepared: Prepared, clock: Clock, *, step: int) -> list[Change]:
    """Records configuration, budget and waiting times, once it is known that the run can continue.

    Returns which rewards have changed since the last start.

    Recorded earlier, a refused `--extend` would be added a second time by the same command.
    """
    config, folder, more = prepared.config, prepared.folder, prepared.extend
    if replaces_budget(config, folder):
        # Before the configuration with the earlier budget is replaced.
        folder.journal("budget", step=step, **vars(Budget.given(config.budget)))
    _record_hardware(prepared, step=step)
    changes = record_reward_changes(folder, config, prepared.reward_code, step=step)
    folder.create(config)
    if why := os.environ.get(RESTARTED_WHY):
        folder.journal(RESTARTED, why=why)
    record_reward_code(folder, prepared.reward_code)
    if more is not None:
        folder.journal("extended", step=step, steps=more.steps, time_s=more.time_s)
    if prepared.waited_s:
        folder.journal("waited", seconds=prepared.waited_s, elapsed_s=clock.elapsed_s)
    if clock.waited_s >= _NOTABLE_WAIT_S:
        used = config.budget.from_submission
        folder.journal("waited_for_devices", seconds=clock.waited_s, used=used)
    return changes


def record_reward_changes(
    folder: RunFolder, config: Config, code: Mapping[str, str], *, step: int
) -> list[Change]:
    """Journals which rewards a resume has changed; before `create` replaces the configuration.

    Args:
        folder: of the run.
        config: of the resume.
        code: SHA-256 of the file that defines each part, by name.
        step: training steps done.

    Returns:
        The changes; empty for a new run.
    """
    if not folder.holds_run:
        return []
    changes = reward_changes(
        folder.saved_config,
        config.model_dump(mode="json"),
        old_code=provenance(folder.entries()).get("rewards", {}),
        new_code=code,
    )
    if changes:  # not `step`: a rollback to an earlier step does not bring the old ones back
        folder.journal(REWARDS_CHANGED, after_step=step, changes=changes)
    return changes


def record_reward_code(folder: RunFolder, code: Mapping[str, str]) -> None:
    """Journals the hashes of the reward functions' code if they are new; after `create`."""
    if code and code != provenance(folder.entries()).get("rewards"):
        folder.journal(REWARDS, sha256=dict(code))


def _record_hardware(prepared: Prepared, *, step: int) -> None:
    """Journals and prints that the run continues on other devices or with other sizes."""
    config, folder = prepared.config, prepared.folder
    if not folder.holds_run:
        return
    changes = hardware_changes(folder.saved_config, config.model_dump(mode="json"))
    if changes:
        # Not `step`: a rollback to an earlier step does not bring the old hardware back.
        folder.journal("hardware_changed", after_step=step, changes=changes)
        say(
            f"other devices or sizes from step {step + 1} on; the results equal those of the "
            f"former ones up to rounding:\n{change_lines(changes)}"
        )
