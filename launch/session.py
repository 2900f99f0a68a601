"""Runs one process of a run: cluster, actors, resume, coordinator, orderly end."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from actors.groups import RunActors
from configs.resume import change_lines
from launch.cluster import cluster, wait_for_devices
from launch.exits import EXIT_DIED, EXIT_FAILED, EXIT_MISTAKE, Failure, disk_problem, say
from launch.flags import SUPERVISOR
from launch.fork import copy_start, origin
from launch.preparation import Prepared, reward_code
from launch.progress import watched
from launch.resume import check_restored, record_start, resume
from launch.source import code_version
from launch.stop import Stop, Stopped, unless
from pipeline.budget import Budget, used_s
from pipeline.clock import Clock, PhaseClock
from pipeline.compute.builds import built_facts
from pipeline.coordinator import Coordinator
from pipeline.data.text.prompts import PromptMaker
from pipeline.deadline import EXIT, EXPORT, BudgetTooSmallError, Deadline, PartTimes
from pipeline.evaluate.notices import UNTRAINED_EXPORT
from pipeline.plan.choose_sizes import REDUCED, Chosen, choose_sizes, plan_file, reduced
from pipeline.protocols import OutOfMemory, WorkerDied
from pipeline.rollout.mismatch import MismatchError
from pipeline.rollout.workers import TrainingStopped, Workers
from pipeline.run.console import Console
from pipeline.run.history import STARTED, provenance
from pipeline.run.meter import Hardware, RunMeter
from pipeline.run.mirror import Mirror, mirror_url
from pipeline.run.record_files import DamagedFileError
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from pipeline.run.tracking import Tracker
from pipeline.run_context import RunContext

_EXPORT_PER_LOAD, _EXPORT_FLOOR_S = 3.0, 5.0
"""An export merges, writes and reads the weights: estimated as three loads until measured."""
_SAVING = "stopping: a checkpoint is written first; Ctrl-C again does not wait"
_ENDED = {0: "finished", EXIT_FAILED: "failed", EXIT_MISTAKE: "refused"}
"""How a run ended, by exit status."""
_EXIT_S = 4.0
"""Actors and Ray end after the last record is written; the upload to W&B follows."""


@dataclass
class _Session:
    """What the functions of this module share; `clock` is the budget's, `meter` its time."""

    prepared: Prepared
    stop: Stop
    clock: Clock
    meter: RunMeter
    tracker: Tracker
    mirror: Mirror
    console: Console

    @property
    def during(self) -> Callable[[str], AbstractContextManager[None]]:
        """Makes a block a phase of this process."""
        return self.meter.phases.during


async def run_session(prepared: Prepared, *, started: float) -> int:
    """Runs until the budget is used or a signal arrives; returns the exit status.

    `started` is the start of this process by `time.monotonic`.

    Raises:
        ValueError: if devices, weights or rewards are not as configured, before training starts.
        FileNotFoundError: if weights or tokenizer are missing.
        Failure: if Ray does not start, or ends before the run does.
    """
    stop = Stop("stopping; Ctrl-C again does not wait")
    stop.listen()
    # Locked from here on: a second command for this run would wait for devices in vain.
    with prepared.folder.held():
        prepared = replace(prepared, config=copy_start(prepared.config))
        clock = Clock(started=started, used_before_s=used_s(prepared.folder))
        phases = PhaseClock()
        phases.add("loading", phases.now() - started)  # configuration, data, check of the rewards
        meter = RunMeter(prepared.folder, Hardware.of(prepared.config), phases)
        # What the user sees, from before Ray starts until W&B has ended.
        shown = Console(
            prepared.config.run.name,
            clock=clock,
            phase=lambda: phases.current,
            status_file=prepared.folder.status,
        )
        shown.update(phase="loading")
        with shown as console, closing(_tracker(prepared)) as tracker:
            mirror = Mirror(mirror_url(prepared.config))
            return await _run_and_upload(
                _Session(prepared, stop, clock, meter, tracker, mirror, console)
            )


async def _run_and_upload(session: _Session) -> int:
    """Runs, then waits until all is uploaded; returns the exit status."""
    folder, mirror = session.prepared.folder, session.mirror
    try:
        with session.during("end"):
            status = await _run(session)
    except Failure as failure:
        if folder.holds_run:
            folder.journal("failed", error=str(failure))
        await session.tracker.finish(exit_status=EXIT_FAILED)
        await mirror.finish()
        raise
    session.console.update(phase="end")
    session.stop.notice = "the run has ended; Ctrl-C again does not wait for uploads"
    with session.clock.waiting():  # the devices are free
        # W&B shows any other status as a failure, but a stopped run has its checkpoint.
        await session.tracker.finish(exit_status=status if status in _ENDED else 0)
        await mirror.finish()
    session.console.end(_ENDED.get(status, "interrupted"))
    return status


async def _run(session: _Session) -> int:
    """Runs on a cluster; returns the exit status."""
    with ExitStack() as stack:
        with session.during("ray_start"):
            stack.enter_context(cluster(session.prepared.config))
            session.stop.listen()
        try:
            return await _run_actors(session)
        except Stopped:
            return session.stop.exit_status
        except OutOfMemory as error:
            raise Failure(error) from None


async def _run_actors(session: _Session) -> int:
    """Starts all processes and runs the coordinator; returns the exit status.

    The death of one of them ends this process.

    Raises:
        Stopped: if a signal arrives before the coordinator runs.
        OutOfMemory: if there are no sizes with which the processes can start, or continue.
    """
    config = session.prepared.config
    actors = RunActors.spawn(config)
    try:
        workers = Workers(
            samplers=actors.samplers,
            learner=actors.learner,
            scorer=actors.scorer,
            config=config,
            clock=session.clock,
            stop=session.stop.event,
            one_process=actors.one_process,
        )
        processes = {name: process.heartbeat for name, process in workers.reporting.items()}
        processes["rewards"] = actors.scorer.heartbeat

        async def work() -> int:
            with session.during("loading"):
                chosen = await unless(session.stop, _start(session, actors))
                return await _coordinate(session, actors, workers, chosen)

        phases, console = session.meter.phases, session.console
        return await watched(work(), processes, phases=phases, console=console)
    except WorkerDied as death:
        _end_at_once(session, death)
    finally:
        actors.kill()


def _end_at_once(session: _Session, death: WorkerDied) -> NoReturn:
    """Ends this process, as if it were killed: Ray may be gone, and would be waited for."""
    with suppress(OSError):
        if session.prepared.folder.holds_run:
            session.prepared.folder.journal("failed", error=str(death))
    say(f"{death}; the same command continues from the last checkpoint", file=sys.stderr)
    if session.stop.event.is_set():
        os._exit(session.stop.exit_status)
    os._exit(EXIT_DIED if SUPERVISOR in os.environ else EXIT_FAILED)


async def _start(session: _Session, actors: RunActors) -> Chosen:
    """Acquires the devices, loads, compiles and chooses the sizes.

    Raises:
        Failure: if the code of a reward has changed since it was checked.
        NothingSmaller: if no sizes fit.
        ValueError: if a given size does not fit, or weights or rewards cannot be used.
    """
    config = session.prepared.config
    with session.clock.waiting(), session.during("device_wait"):
        await wait_for_devices(actors.devices)
    await actors.started()
    say("Devices acquired; loading weights and compiling.")
    choosing = choose_sizes(
        config,
        session.prepared.folder.plan,
        learner=actors.learner,
        samplers=actors.samplers,
        one_process=actors.one_process,
        display=session.console,
    )
    began_s = time.monotonic()

    async def start_rewards() -> tuple[Any, float]:
        return await actors.scorer.start(), time.monotonic() - began_s

    chosen, (rewards, rewards_s) = await asyncio.gather(choosing, start_rewards())
    # A restart waits for the rewards in any case.
    started_s = time.monotonic() - began_s
    chosen = replace(chosen, once_s=min(chosen.once_s, started_s - rewards_s))
    if reward_code(rewards) != session.prepared.reward_code:
        raise Failure(
            "the file of a reward function has changed while the run was starting; give the "
            "command again",
            EXIT_FAILED,
        )
    return chosen


async def _coordinate(
    session: _Session, actors: RunActors, workers: Workers, chosen: Chosen
) -> int:
    """Resumes and runs the coordinator; returns the exit status.

    Raises:
        OutOfMemory: if there are no smaller sizes to continue with.
        WorkerDied: if a process dies, or has run out of memory.
    """
    config, folder = session.prepared.config, session.prepared.folder
    coordinator = await _coordinator(session, actors, workers, chosen)
    try:
        ended = await coordinator.run()
    except BudgetTooSmallError as mistake:
        say(mistake, file=sys.stderr)
        return EXIT_MISTAKE
    except OutOfMemory as error:
        less = reduced(config, chosen.sizes, error)
        change = {"old": chosen.sizes.to_json(), "new": less.to_json(), "phase": error.phase}
        folder.journal(REDUCED, step=coordinator.progress.step, reason=error.what, **change)
        folder.write_plan(plan_file(config, less))
        raise WorkerDied("run", f"{error}; plan.json has smaller sizes now") from None
    except WorkerDied:
        raise
    except Exception as error:  # noqa: BLE001  # any error: journaled, shown, exit status 1
        _report_failure(session, error)
        return EXIT_FAILED
    say(f"{ended}: {folder.path}")
    if ended == "finished" and (why := (folder.summary or {}).get(UNTRAINED_EXPORT)):
        say(f"WARNING: {why}")
    return 0 if ended == "finished" else session.stop.exit_status


def _last_alarm(folder: RunFolder) -> dict[str, Any] | None:
    """The last alarm of earlier processes, as the console shows it."""
    alarms = folder.valid_entries("alarm")
    if not alarms:
        return None
    last = alarms[-1]
    return {"step": last["step"], "rule": last["rule"], "text": last["fact"]}


async def _coordinator(
    session: _Session, actors: RunActors, workers: Workers, chosen: Chosen
) -> Coordinator:
    """Restores the newest checkpoint and records the start; what follows is the training loop."""
    prepared, clock = session.prepared, session.clock
    config, folder = prepared.config, prepared.folder
    restored = await actors.learner.restore()
    check_restored(restored, folder)
    at = 0 if restored.meta is None else restored.meta["step"]
    changes = record_start(prepared, clock, step=at)
    progress, resumed_from = resume(restored, folder)
    budget = Budget.of(config, folder)
    deadline = _deadline(prepared, clock, budget, chosen)
    records = Records(folder, session.tracker, session.console, session.mirror)
    session.console.update(
        step=progress.step,
        steps_planned=budget.steps,
        deadline_s=deadline.time_s,
        last_alarm=_last_alarm(folder),
    )
    spent = session.meter.start(
        await workers.uses(), elapsed_s=clock.elapsed_s, used_before_s=clock.used_before_s
    )
    _track(prepared, records, spent=spent)
    session.mirror.start(folder.path, log_event=records.event)
    if changes:
        text = change_lines(changes)
        records.say(f"the rewards have changed after step {progress.step}:\n{text}")
    session.stop.notice = _SAVING
    folder.journal("compiled", **built_facts(chosen.built))
    folder.journal("sizes", **chosen.sizes.to_json(), measured=chosen.measured)
    folder.write_plan(plan_file(config, chosen.sizes))
    context = RunContext(
        config,
        data=prepared.data,
        maker=PromptMaker(config.prompt, prepared.tokenizer),
        workers=workers,
        records=records,
        meter=session.meter,
        deadline=deadline,
        clock=clock,
        sizes=chosen.sizes,
        resumed_from=resumed_from,
    )
    return Coordinator(context, progress)


def _report_failure(session: _Session, error: Exception) -> None:
    """Journals and shows an error that ends the run."""
    problem = disk_problem(error)
    with suppress(OSError):  # the disk may be full
        session.prepared.folder.journal("failed", error=f"{type(error).__name__}: {error}")
    if problem is not None or isinstance(error, MismatchError | TrainingStopped | DamagedFileError):
        say(problem or error, file=sys.stderr)
    else:
        say("".join(traceback.format_exception(error)).rstrip(), file=sys.stderr)
    # After these the same command would fail again; their messages have the remedy.
    if not isinstance(error, MismatchError | DamagedFileError):
        say("the run failed; the same command continues from its last checkpoint")


def _deadline(prepared: Prepared, clock: Clock, budget: Budget, chosen: Chosen) -> Deadline:
    """The deadline of the run; the coordinator adds the measurements of earlier processes."""
    estimates = {EXPORT: _EXPORT_FLOOR_S + _EXPORT_PER_LOAD * chosen.load_s, EXIT: _EXIT_S}
    return Deadline(
        prepared.config,
        steps=budget.steps,
        time_s=budget.deadline_s(elapsed_s=clock.elapsed_s, now_s=time.time()),
        until_s=budget.until_s,
        parts=PartTimes(estimates),
        once_s=chosen.once_s,
    )


def _tracker(prepared: Prepared) -> Tracker:
    """W&B, not started yet, with the run id of earlier processes."""
    before = [entry["wandb_id"] for entry in prepared.folder.events(STARTED)]
    known = [run_id for run_id in before if run_id is not None]
    return Tracker(prepared.wandb_mode, run_id=known[-1] if known else None)


def _track(prepared: Prepared, records: Records, *, spent: Mapping[str, Any]) -> None:
    """Journals the start of the process with its time (see `RunMeter.start`), and starts W&B."""
    folder, tracker, code = prepared.folder, records.tracker, code_version()
    before = provenance(folder.entries()).get("code", code)
    if before != code:
        records.event(
            "code_changed",
            f"the code has changed since the last start: it was {before} and is {code}; steps from "
            "here on may differ from those of the former code",
            before=before,
            now=code,
        )
    checkpoint = origin(prepared.config)
    if checkpoint is not None and not any(folder.events("forked")):
        records.event(
            "forked",
            f"forked from {prepared.config.run.fork}, with its optimizer state",
            source=prepared.config.run.fork,
            adapter_sha256=checkpoint.adapter_sha256,
            provenance=dict(checkpoint.provenance),
        )
    folder.journal(
        STARTED,
        wandb_id=tracker.run_id,
        code=code,
        base=prepared.base,
        data=prepared.data.fingerprints,
        rewards=prepared.reward_code,
        **spent,
    )
    tracker.start(prepared.config, folder=folder.path, rows=folder.metrics, log_event=records.event)
