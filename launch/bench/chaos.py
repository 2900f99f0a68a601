"""`python -m launch.bench chaos`: seconds that kill -9 and SIGSTOP of each process of a run cost.

A row is a role and a signal, sent once to its process, after a step; the run is started again and
ends with the adapter of the undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from launch.bench.harness import Claim, Figures, Found, Row, Section
from launch.bench.launched import train_command
from pipeline.run.run_folder import RunFolder

SIGNALLED_AFTER = 5
"""Steps at least; a checkpoint is written every two steps."""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
ROLES = {
    "the run's process": r"launch\.train .*--no-supervise",
    "its parent": r"launch\.train (?!.*--no-supervise)",
    "learner": r"^ray::LearnerActor",
    "sampler": r"^ray::SamplerActor",
    "colocated": r"^ray::ColocatedActor",
    "rewards' host": r"^ray::RewardActor",
    "reward process": r"rewards\.processes",
    "raylet": r"/raylet ",
    "GCS": r"/gcs_server ",
}
"""Patterns of command lines; of several processes, the oldest gets the signal."""
_MARK = "GEMMA_GRPO_CHAOS"
"""Environment variable that marks the processes of a run."""
_POLL_S, _END_S = 0.02, 75.0
"""Processes of a run that has ended get `_END_S` to end; Ray's agents need 60 s."""
SETTINGS: dict[str, Any] = {
    "faults.stuck_s": 20,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    # One shape of each program: most of a start is compiling.
    "plan.slots": 16,
    "plan.slot_buckets": "[]",
    "plan.prefill_tokens": 208,
    "plan.micro_batch_tokens": 192,
    "plan.sampler_devices": 1,
    "plan.learner_devices": 1,
    "data.validation.limit": 16,
    "data.test.limit": 8,
    "eval.every_steps": 4,
    "checkpoint.every_steps": 2,
    "budget.steps": 24,
}
COLOCATED = {"plan.placement": "colocated", "plan.samplers": "none", "plan.sampler_devices": "none"}


def measure(*, role: str = "", event: str = "") -> Figures:
    """A run, one process of which gets a signal, of `SIGNALS`; role "": none does."""
    began_s, lost_s, mark = time.monotonic(), 0.0, uuid.uuid4().hex
    settings = SETTINGS | (COLOCATED if role == "colocated" else {})
    with tempfile.TemporaryDirectory(prefix="c") as scratch, Path(scratch, "log").open("w+") as log:
        command = train_command("configs/demo.toml", settings, folder=scratch)
        environment = os.environ | {_MARK: mark}
        start = partial(subprocess.Popen, command, stdout=log, stderr=log, env=environment)
        run, folder = start(), RunFolder(Path(scratch, "run"))
        try:
            if role:
                step = _wait_for_training(run, folder)
                next(_processes(mark, ROLES[role])).send_signal(SIGNALS[event])
                signalled_s = time.monotonic()
                if role == "its parent":
                    run.wait()
                    run = start()
                _wait_for_step(step + 1, run, folder)
                lost_s = time.monotonic() - signalled_s
            status = run.wait()
        except BaseException:
            _end(mark, wait_s=0)
            raise
        left = _end(mark, wait_s=_END_S)
        log.seek(0)
        text = log.read()
        result = (folder.summary or {}).get("adapter_sha256", f"status {status}: {text[-200:]}")
    return {
        "lost_s": lost_s,
        "result": result[:12],
        "restarts": text.count("; it is started again"),
        "left": ", ".join(left) or "nothing",
        "seconds": time.monotonic() - began_s,
    }


def _wait_for_training(run: subprocess.Popen[str], folder: RunFolder) -> int:
    """Waits until all processes train, by the run's status; returns the last step.

    While one of them loads, compiles or writes files, a process may stand still for half an hour.
    """
    while run.poll() is None:
        status = folder.last_status
        if status.get("step", 0) >= SIGNALLED_AFTER and not status["slow"]:
            return max(row["step"] for row in folder.metrics)
        time.sleep(_POLL_S)
    raise RuntimeError(f"the run ended before it trained for {SIGNALLED_AFTER} steps")


def _wait_for_step(step: int, run: subprocess.Popen[str], folder: RunFolder) -> None:
    while run.poll() is None:
        if any(row["step"] == step for row in folder.metrics):
            return
        time.sleep(_POLL_S)
    raise RuntimeError(f"the run ended before step {step}")


def _processes(mark: str, pattern: str = "") -> Iterator[psutil.Process]:
    """The processes of a run, by the mark in their environment; the oldest first."""
    for one in sorted(psutil.process_iter(), key=psutil.Process.create_time):
        with suppress(psutil.Error):
            is_role = re.search(pattern, _command_line(one))
            if is_role and one.environ().get(_MARK) == mark:
                yield one


def _end(mark: str, *, wait_s: float) -> list[str]:
    """Kills the processes of a run that do not end by then; returns their command lines."""
    _, alive = psutil.wait_procs(list(_processes(mark)), timeout=wait_s)
    left = [_command_line(one)[:80] for one in alive]
    for one in alive:
        with suppress(psutil.Error):
            one.kill()
    return left


def _command_line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def claims(found: Found) -> Iterator[Claim]:
    """That all rows end with the adapter of the first, and leave no process."""
    done = {name: figures for name, figures in found.items() if "result" in figures}
    results = [figures["result"] for figures in done.values()]
    for name, figures in done.items():
        same = figures["result"] == results[0] and not results[0].startswith("status")
        yield Claim(f"{name}: the adapter of the first row ({figures['result']})", same)
        yield Claim(f"{name}: nothing is left ({figures['left']})", figures["left"] == "nothing")


def sections(request: argparse.Namespace) -> list[Section]:
    """A row for each role and signal; quick: a sampler's death."""
    # Without its parent a run goes on, and nobody starts it again.
    faults = [(role, event) for event in SIGNALS for role in ROLES]
    faults.remove(("its parent", "stopped"))
    rows = [
        Row("undisturbed", measure, seconds=30),
        *(
            Row(f"{role}, {event}", measure, {"role": role, "event": event}, seconds=60)
            for role, event in ([("sampler", "killed")] if request.quick else faults)
        ),
    ]
    title = (
        "kill -9 or SIGSTOP of a process of a small run in training: seconds to "
        "the next step; a stopped process is found after 20 s"
    )
    return [Section("chaos", title, rows, [claims])]
