"""Seconds that kill -9 and SIGSTOP of each process of a small run cost, by role.

A row is a role and a signal, sent once to its process, after a step; the run is started again and
ends with the adapter of the undisturbed run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import configs
from launch.bench.harness import Benchmark, Claim, Figures, Row, Section
from pipeline.run.run_folder import RunFolder

SIGNALLED_AFTER = 5
"""Steps; the last checkpoint is that of step 4."""


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
_POLL_S = 0.02
_END_S = 30.0
"""Processes of a run that has ended get some time to end."""
_SETTINGS: Mapping[str, Any] = {
    "run.name": "run",
    "faults.stuck_s": 20,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    # One shape of each program: most of a start is compiling.
    "plan.slots": 16,
    "plan.slot_buckets": "[]",
    "plan.prefill_tokens": 208,
    "plan.micro_batch_tokens": 192,
    "plan.learner_devices": 1,
    "data.validation.limit": 16,
    "data.test.limit": 8,
    "eval.every_steps": 4,
    "checkpoint.every_steps": 2,
    "wandb.mode": "disabled",
    "budget.steps": 8,
}


def measure(*, role: str = "", event: str = "") -> Figures:
    """A run, one process of which gets a signal.

    Args:
        role: a key of `ROLES`; "": none.
        event: a key of `SIGNALS`.
    """
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="c") as scratch:
        run = _Run(Path(scratch), role)
        try:
            run.start()
            lost_s = run.lost_s(SIGNALS[event]) if role else 0.0
            status = run.wait()
        finally:
            left = run.end()
        log = Path(scratch, "log").read_text()
        result = (run.folder.summary or {}).get("adapter_sha256", f"status {status}: {log[-200:]}")
    return {
        "lost_s": lost_s,
        "result": result[:12],
        "restarts": log.count("; it is started again"),
        "left": ", ".join(left) or "nothing",
        "seconds": time.monotonic() - began_s,
    }


class _Run:
    """A run in a folder of its own."""

    def __init__(self, scratch: Path, role: str) -> None:
        self._role, self._log = role, scratch / "log"
        self._mark, project = uuid.uuid4().hex, Path(configs.__file__).parents[1]
        self._environment = os.environ | {_MARK: self._mark, "PYTHONPATH": str(project)}
        placement: Mapping[str, Any] = {"plan.sampler_devices": 1}
        if role == "colocated":
            samplers = {"plan.samplers": "none", "plan.sampler_devices": "none"}
            placement = {"plan.placement": "colocated", **samplers}
        settings = {**_SETTINGS, "run.dir": scratch, **placement}
        self._command = [
            *(sys.executable, "-m", "launch.train", f"{project}/configs/demo.toml"),
            *(f"--{key}={value}" for key, value in settings.items()),
        ]
        self.folder = RunFolder(scratch / "run")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Gives the command."""
        with self._log.open("a") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )

    def lost_s(self, number: signal.Signals) -> float:
        """Sends the role's process a signal; returns the seconds until there is a new step."""
        self._wait_for_step(SIGNALLED_AFTER)
        next(self._processes(ROLES[self._role])).send_signal(number)
        signalled_s = time.monotonic()
        if self._role == "its parent":
            assert self._process is not None
            self._process.wait()
            self.start()
        self._wait_for_step(SIGNALLED_AFTER + 1)
        return time.monotonic() - signalled_s

    def wait(self) -> int:
        """Returns the exit status of the command."""
        assert self._process is not None
        return self._process.wait()

    def end(self) -> list[str]:
        """Kills the processes that are left; returns their command lines."""
        _, alive = psutil.wait_procs(list(self._processes()), timeout=_END_S)
        left = [_command_line(one)[:80] for one in alive]
        for one in alive:
            with suppress(psutil.Error):
                one.kill()
        return left

    def _wait_for_step(self, step: int) -> None:
        assert self._process is not None
        rows = self.folder.path / "metrics.jsonl"
        while self._process.poll() is None:
            with suppress(OSError):
                if f'"step": {step},' in rows.read_text():
                    return
            time.sleep(_POLL_S)
        raise RuntimeError(f"the run ended before step {step}: {self._log.read_text()[-400:]}")

    def _processes(self, pattern: str = "") -> Iterator[psutil.Process]:
        """The processes of the run, by the mark in their environment; the oldest first."""
        for one in sorted(psutil.process_iter(), key=psutil.Process.create_time):
            with suppress(psutil.Error):
                is_role = re.search(pattern, _command_line(one))
                if is_role and one.environ().get(_MARK) == self._mark:
                    yield one


def _command_line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    done = {name: figures for name, figures in found.items() if "result" in figures}
    results = [figures["result"] for figures in done.values()]
    for name, figures in done.items():
        same = figures["result"] == results[0]
        yield Claim(f"{name}: the adapter of the first row ({figures['result']})", same)
        yield Claim(f"{name}: nothing is left ({figures['left']})", figures["left"] == "nothing")


BENCHMARK = Benchmark(
    [
        Section(
            "chaos",
            f"kill -9 or SIGSTOP of a process of a small run after step {SIGNALLED_AFTER}: "
            "seconds to the next step; a stopped process is found after 20 s",
            [
                Row("undisturbed", measure),
                *(
                    Row(f"{role}, {event}", measure, {"role": role, "event": event})
                    for event in SIGNALS
                    for role in ROLES
                    # Without its parent a run goes on, and nobody starts it again.
                    if (role, event) != ("its parent", "stopped")
                ),
            ],
            [_claims],
            environment={},
        )
    ]
)
