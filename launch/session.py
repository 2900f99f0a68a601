"""Runs one process of a run: cluster, actors, resume, coordinator, orderly end."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from actors.handles import RunActors
from configs.schema import Config
from launch.cluster import cluster, wait_for_devices
from launch.code_version import code_version
from launch.exits import EXIT_DIED, EXIT_FAILED, EXIT_MISTAKE, Failure, disk_problem, say
from launch.flags import SUPERVISOR
from launch.fork import copy_start, origin
from launch.maintenance import stop_at_notice
from launch.preparation import Prepared, reward_code
from launch.progress import Reporter
from launch.resume import check_restored, record_start, resume
from launch.stop import Stop, Stopped, unless
from pipeline.contracts.clock import Clock
from pipeline.contracts.decisions import EXIT, EXPORT
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.phases import PhaseClock, Span
from pipeline.contracts.record_files import DamagedFileError
from pipeline.contracts.workers import WorkerDied
from pipeline.control.budget import Budget, used_s
from pipeline.control.deadline import BudgetTooSmallError, Deadline
from pipeline.control.estimates import ShutdownEstimate
from pipeline.coordinator import Coordinator
from pipeline.evaluate.notices import UNTRAINED_EXPORT
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.plan.calibration import CalibrationStart, calibrate
from pipeline.plan.cost_model.hardware import chip_speeds
from pipeline.plan.size_controller import SizeController
from pipeline.report.goodput import Hardware
from pipeline.report.meter import RunMeter
from pipeline.rollout.parity import ParityError
from pipeline.rollout.workers import TrainingStopped, Workers
from pipeline.run.console import Console
from pipeline.run.history import STARTED, provenance
from pipeline.run.ledger import DAMAGED, Ledger, missing_lines, repair_ledger
from pipeline.run.mirror import Mirror
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from pipeline.run.tracking import Tracker

_EXPORT_PER_LOAD, _EXPORT_FLOOR_S = 3.0, 5.0
"""An export merges, writes and reads the weights: estimated as three loads until measured."""
_NOTE_EVERY_S = 5.0
"""A killed process loses at most this much of its used time."""
_SAVING = "stopping: a checkpoint is written first; Ctrl-C again does not wait"
_ENDED = {0: "finished", EXIT_FAILED: "failed", EXIT_MISTAKE: "refused"}
"""How a run ended, by exit status."""
_EXIT_S = 4.0
"""Actors and Ray end after the last record is written; the upload to W&B follows."""


@dataclass
class _Session:
    """What the functions of this module share.

    Attributes:
        prepared: the run.
        stop: set by a signal.
        clock: of the budget.
        meter: of seconds and tokens.
        tracker: W&B.
        mirror: the copy on another host.
        console: what the user sees.
        reporter: tells the parent about progress.
        rehearse: of a rehearsal, whose folder is deleted afterwards: changes the actors.
    """

    prepared: Prepared
    stop: Stop
    clock: Clock
    meter: RunMeter
    tracker: Tracker
    mirror: Mirror
    console: Console
    reporter: Reporter
    rehearse: Callable[[RunActors], RunActors] | None = None

    @property
    def during(self) -> Callable[[str], AbstractContextManager[None]]:
        """Makes a block a phase of this process."""
        return self.meter.ledger.phases.during


async def run_session(
    prepared: Prepared,
    *,
    started: float,
    rehearse: Callable[[RunActors], RunActors] | None = None,
) -> int:
    """Runs until the budget is used or a signal arrives; returns the exit status.

    Args:
        prepared: the run.
        started: start of this process by `time.monotonic`.
        rehearse: of a rehearsal, whose folder is deleted afterwards: changes the actors.

    Raises:
        ValueError: if devices, weights or rewards are not as configured, before training starts.
        FileNotFoundError: if weights or tokenizer are missing.
        Failure: if Ray does not start, or ends before the run does.
    """
    stop = Stop("stopping; Ctrl-C again does not wait")
    stop.listen()
    if prepared.config.plan.platform == "tpu":
        stop_at_notice(stop, prepared.folder)
    # Locked from here on: a second command for this run would wait for devices in vain.
    with prepared.folder.held():
        prepared = replace(prepared, config=copy_start(prepared.config))
        clock = _clock(prepared, started=started)
        meter = _meter(prepared, clock, started=started)
        if clock.used_before_s and not prepared.folder.holds_run:
            say(
                f"{clock.used_before_s:.0f} s were used by a process that was killed before the "
                f"run began; to begin anew delete {prepared.folder.path}"
            )
        with (
            _console(prepared, clock, meter) as console,
            closing(_tracker(prepared)) as tracker,
        ):
            reporter = Reporter(meter.ledger.phases)
            mirror = Mirror.of(prepared.config)
            return await _run_and_upload(
                _Session(prepared, stop, clock, meter, tracker, mirror, console, reporter, rehearse)
            )


async def _run_and_upload(session: _Session) -> int:
    """Runs, then waits until all is uploaded; returns the exit status."""
    folder, meter, mirror = session.prepared.folder, session.meter, session.mirror
    with _recording_time(folder, session.clock):
        try:
            with session.during("end"):
                status = await _run(session)
        except Failure as failure:
            if folder.holds_run:
                folder.journal("failed", error=str(failure))
            meter.close()
            await session.tracker.finish(exit_status=EXIT_FAILED)
            await mirror.finish()
            raise
    # The devices are free, and the budget's clock has stopped.
    meter.close()
    session.reporter.write()
    session.stop.notice = "the run has ended; Ctrl-C again does not wait for uploads"
    await session.tracker.finish(exit_status=status)
    await mirror.finish()
    session.console.end(_ENDED.get(status, "interrupted"))
    return status


def _meter(prepared: Prepared, clock: Clock, *, started: float) -> RunMeter:
    """The meter of the run; the ledger begins with this process."""
    phases, folder = PhaseClock(), prepared.folder
    now_s = phases.now()
    start_s = now_s - (time.monotonic() - started)
    phases.add(Span("loading", start_s, now_s))  # configuration, data, check of the rewards
    try:
        ledger = Ledger(folder.ledger, phases=phases, start_s=start_s)
        lines = missing_lines(ledger.lines, folder.entries())
        text = f"has lost its end: {lines} lines, and their tokens are not counted"
    except DamagedFileError:
        lines = repair_ledger(folder.ledger)
        text = (
            f"is damaged: {lines} of its lines are lost, and their time is unexplained; the old "
            "file is in superseded/"
        )
        ledger = Ledger(folder.ledger, phases=phases, start_s=start_s)
    if lines:
        folder.journal(DAMAGED, lines=lines)
        say(f"{folder.ledger} {text}")
    uncounted = (
        entry["seconds"] for entry in folder.events("waited_for_devices") if not entry["used"]
    )
    # Used, but no process was there.
    queued = (entry["seconds"] for entry in folder.events("waited"))
    ledger.lost(clock.used_before_s + sum(uncounted) - sum(queued))
    return RunMeter(ledger, Hardware.of(prepared.config))


def _console(prepared: Prepared, clock: Clock, meter: RunMeter) -> Console:
    """What the user sees, from before Ray starts until W&B has ended."""
    phases = meter.ledger.phases
    return Console(
        prepared.config.run.name,
        clock=clock,
        phase=lambda: phases.current or "end",
        status_file=prepared.folder.status,
    )


def _clock(prepared: Prepared, *, started: float) -> Clock:
    """The run's clock: the time of earlier processes, and of this one since it was submitted."""
    return Clock(started=started - prepared.waited_s, used_before_s=used_s(prepared.folder))


@contextmanager
def _recording_time(folder: RunFolder, clock: Clock) -> Iterator[None]:
    """Records the used time every few seconds, so that it is known of a killed process, too."""
    ended = threading.Event()

    def note() -> None:
        while True:
            with suppress(OSError):
                folder.record_used_s(clock.elapsed_s)
            if ended.wait(_NOTE_EVERY_S):
                return

    thread = threading.Thread(target=note, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def _run(session: _Session) -> int:
    """Runs on a cluster; returns the exit status."""
    stop, config = session.stop, session.prepared.config
    with ExitStack() as stack:
        with session.during("ray_start"):
            stack.enter_context(cluster(config.plan, tpu_chips=config.run.tpu_chips))
            stop.listen()
        try:
            return await _run_actors(session)
        except Stopped:
            return stop.exit_status
        except OutOfMemory as error:
            say(error, file=sys.stderr)
            return EXIT_FAILED


async def _run_actors(session: _Session) -> int:
    """Starts all processes and runs the coordinator; returns the exit status.

    The death of one of them ends this process.

    Raises:
        Stopped: if a signal arrives before the coordinator runs.
        OutOfMemory: if there are no sizes with which the processes can start.
    """
    prepared = session.prepared
    config = prepared.folder.in_force(prepared.config)
    beginning = CalibrationStart.of(config, prepared.folder.plan)
    actors = RunActors.spawn(config)
    try:
        if session.rehearse is not None:
            actors = session.rehearse(actors)
        workers = _workers(session, config, actors, beginning)
        processes = {name: process.heartbeat for name, process in workers.reporting.items()}
        processes["rewards"] = actors.scorer.heartbeat

        async def work() -> int:
            with session.during("loading"):
                load_s = await unless(session.stop, _start(session, actors, workers, beginning))
                return await _coordinate(session, config, actors, workers, load_s=load_s)

        return await session.reporter.watched(work(), processes)
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


def _workers(
    session: _Session, config: Config, actors: RunActors, beginning: CalibrationStart
) -> Workers:
    """The workers of the run; none is prepared yet."""
    return Workers(
        samplers=actors.samplers,
        learner=actors.learner,
        scorer=actors.scorer,
        sizes=SizeController(config, beginning.sizes, session.console),
        config=config,
        clock=session.clock,
        stop=session.stop.event,
        one_process=actors.one_process,
    )


async def _start(
    session: _Session, actors: RunActors, workers: Workers, beginning: CalibrationStart
) -> float:
    """Acquires the devices, loads, compiles and measures sizes; returns the seconds of loading.

    Raises:
        Failure: if the code of a reward has changed since it was checked.
    """
    config, during = session.prepared.config, session.during
    with session.clock.waiting(used=config.budget.from_submission), during("device_wait"):
        await wait_for_devices(actors.devices, config.plan)
    await actors.started()
    say("Devices acquired; loading weights and compiling.")
    load_s, rewards = await asyncio.gather(workers.start(), actors.scorer.start())
    if reward_code(rewards) != session.prepared.reward_code:
        raise Failure(
            "the file of a reward function has changed while the run was starting; give the "
            "command again",
            EXIT_FAILED,
        )
    with during("calibration"):
        await calibrate(
            workers.sizes,
            beginning,
            sampler=(workers.sampler_processes[0], actors.samplers[0]),
            learner=(workers.learner_process, actors.learner),
        )
    return load_s


async def _coordinate(
    session: _Session, config: Config, actors: RunActors, workers: Workers, *, load_s: float
) -> int:
    """Resumes and runs the coordinator; returns the exit status.

    Raises:
        WorkerDied: if a process dies.
    """
    prepared, clock, folder = session.prepared, session.clock, session.prepared.folder
    restored = await actors.learner.restore()
    check_restored(restored, folder)
    at = 0 if restored.meta is None else restored.meta["step"]
    changes = record_start(prepared, clock, step=at)
    progress, resumed_from = resume(restored, folder, workers.sizes)
    if resumed_from is not None:
        session.meter.ledger.resumed()
    budget = Budget.of(config, folder)
    deadline = _deadline(prepared, clock, budget, load_s=load_s)
    records = Records(folder, session.tracker, session.console, session.mirror)
    session.console.update(
        step=progress.step,
        steps_planned=budget.steps,
        deadline_s=deadline.time_s,
        last_alarm=records.last_alarm,
    )
    await _track(prepared, clock, records, step=progress.step)
    session.mirror.start(folder.path, log_event=records.event)
    records.rewards_changed(progress.step, changes)
    session.meter.ledger.phases.watch_for_stalls()
    if session.rehearse is None:
        session.stop.notice = _SAVING
    workers.sizes.record(records)
    await workers.prepare()
    coordinator = Coordinator(
        config,
        data=prepared.data,
        maker=PromptMaker(config.prompt, prepared.tokenizer),
        workers=workers,
        records=records,
        meter=session.meter,
        deadline=deadline,
        clock=clock,
        progress=progress,
        resumed_from=resumed_from,
    )
    try:
        ended = await coordinator.run()
    except BudgetTooSmallError as mistake:
        say(mistake, file=sys.stderr)
        return EXIT_MISTAKE
    except WorkerDied:
        raise
    except Exception as error:  # noqa: BLE001  # any error: journaled, shown, exit status 1
        _report_failure(session, error)
        return EXIT_FAILED
    if session.rehearse is None:
        say(f"{ended}: {folder.path}")
        if ended == "finished" and (why := (folder.summary or {}).get(UNTRAINED_EXPORT)):
            say(f"WARNING: {why}")
    return 0 if ended == "finished" else session.stop.exit_status


def _report_failure(session: _Session, error: Exception) -> None:
    """Journals and shows an error that ends the run."""
    folder = session.prepared.folder
    problem = disk_problem(error)
    with suppress(*([] if problem is None else [OSError])):
        folder.journal("failed", error=f"{type(error).__name__}: {error}")
    if problem is not None or isinstance(error, OutOfMemory | ParityError | TrainingStopped):
        say(problem or error, file=sys.stderr)
    else:
        say("".join(traceback.format_exception(error)).rstrip(), file=sys.stderr)
    # After a refused check the same command would fail again; its message has the remedy.
    if session.rehearse is None and not isinstance(error, ParityError):
        accept = isinstance(error, TrainingStopped)
        remedy = " (after a change of the rewards with --accept rewards)" if accept else ""
        say(f"the run failed; the same command continues from its last checkpoint{remedy}")


def _deadline(prepared: Prepared, clock: Clock, budget: Budget, *, load_s: float) -> Deadline:
    """The deadline of the run, with the measurements of earlier processes."""
    config = prepared.config
    most, fewest = config.rollout.prompts_per_step, config.rollout.fewest_prompts
    deadline = Deadline(
        steps=budget.steps,
        time_s=budget.deadline_s(elapsed_s=clock.elapsed_s, now_s=time.time()),
        prompts=(most, fewest),
        validates=config.eval.validates,
        until_s=budget.until_s,
        shutdown=ShutdownEstimate(
            {EXPORT: _EXPORT_FLOOR_S + _EXPORT_PER_LOAD * load_s, EXIT: _EXIT_S}
        ),
    )
    deadline.recall(prepared.folder.metrics, sft_steps=config.sft_steps)
    return deadline


def _tracker(prepared: Prepared) -> Tracker:
    """W&B, not started yet, with the run id of earlier processes."""
    before = [entry["wandb_id"] for entry in prepared.folder.events(STARTED)]
    known = [run_id for run_id in before if run_id is not None]
    return Tracker(prepared.wandb_mode, run_id=known[-1] if known else None)


async def _track(prepared: Prepared, clock: Clock, records: Records, *, step: int) -> None:
    """Journals the start of the process, after `step`, and starts W&B."""
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
        chip_speeds=chip_speeds(prepared.config),
        elapsed_s=clock.elapsed_s,
    )
    rows = records.logged(until=step)
    tracker.start(prepared.config, folder=folder.path, rows=rows, log_event=records.event)
