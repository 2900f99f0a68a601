"""Faults in small runs: whether each run survives them and ends with the undisturbed adapter.

A row is a role. For each signal a run of the demo's model by `launch.train --supervise` gets
several faults, in the phases that the seed draws. A phase is that of any process of the run, as it
reports it (`launch.bench.phase_reports`); the signal goes to the role's process.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import configs
from launch.bench.harness import Benchmark, Claim, Figures, Row, Section
from launch.bench.phase_reports import VARIABLE as REPORTS
from pipeline.run.run_folder import RunFolder

SEED = 2
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
PHASES: Mapping[str, frozenset[str]] = {
    "waiting": frozenset({"ray_start", "device_wait"}),
    "compiling": frozenset({"compile"}),
    "prefill": frozenset({"prefill"}),
    "decode": frozenset({"decode"}),
    "scoring": frozenset({"reward"}),
    "update": frozenset({"update"}),
    "saving": frozenset({"checkpoint"}),
    "publishing": frozenset({"sync"}),
    "evaluating": frozenset({"evaluation"}),
    "exporting": frozenset({"export"}),
}
"""Names in `pipeline.contracts.phases`, in the order of a run."""
STARTING = ("waiting", "compiling")
"""Phases that do not come again with each step: the first fault of a run."""
LEAST = 90
"""Faults that must be sent in all."""


@dataclass(frozen=True)
class Role:
    """A process of a run.

    Attributes:
        pattern: of its command line; of several, the one that was started first gets the signals.
        starting: those of `STARTING` in which it runs.
        is_essential: whether its death ends the run's process, or the command.
        pause_s: seconds by which each reward takes longer.
        settings: that it needs.
    """

    pattern: str
    starting: tuple[str, ...] = STARTING
    is_essential: bool = False
    pause_s: float = 0.02
    settings: Mapping[str, Any] = field(default_factory=dict)


ROLES: Mapping[str, Role] = {
    "driver": Role(r"launch\.train (?!.*--supervise)", is_essential=True),
    "learner": Role(r"^ray::.*LearnerActor", ("compiling",)),
    "sampler": Role(r"^ray::.*SamplerActor", ("compiling",)),
    "one of two samplers": Role(
        r"^ray::.*SamplerActor", ("compiling",), settings={"plan.samplers": 2}
    ),
    "rewards' host": Role(r"^ray::.*RewardActor", ("compiling",)),
    "reward process": Role(r"rewards\.processes", ("compiling",)),
    "supervisor": Role(r"launch\.train .*--supervise", is_essential=True),
    "raylet": Role(r"/raylet ", is_essential=True),
    # A run that ends sooner than 20 s after the GCS is stopped does not notice it.
    "GCS": Role(r"/gcs_server ", is_essential=True, pause_s=0.2),
}
_OUTCOMES = ("in place", "restarted", "given again", "not sent")
"""The run's process went on, the supervisor started another one, or the command ended (in order
after SIGTERM, or with its supervisor) and was given again."""
_ENDED = {-signal.SIGKILL, 128 + signal.SIGTERM}
"""Statuses of a command that is given again."""
_MARK = "GEMMA_GRPO_CHAOS"
"""Environment variable that marks the processes of a run."""
_GONE = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, psutil.STATUS_STOPPED}
_POLL_S = 0.02
_LONGEST_DELAY_S = 0.05
_CONTINUED_S = 3.0
"""Nobody but the user continues a stopped supervisor."""
_END_S = 30.0
"""Processes of a run whose supervisor is gone get some time to end."""
_REWARDS = """
import time

def digits(completion, pause_s):
    time.sleep(pause_s)
    return sum(map(ord, completion)) % 7 / 6
"""
_SETTINGS: Mapping[str, Any] = {
    "run.name": "run",
    "run.dir": "{scratch}",
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rewards.functions": "[{{name = 'digits', function = '{scratch}/planted_rewards.py:digits', "
    "args = {{pause_s = {pause_s}}}}}]",
    "rewards.timeout_s": 5,
    # One shape of each program: most of a start is compiling.
    "plan.slots": 16,
    "plan.slot_buckets": "[]",
    "plan.prefill_tokens": 208,
    "plan.micro_batch_tokens": 192,
    "plan.sampler_devices": 1,
    "plan.learner_devices": 1,
    "learner.updates_per_batch": 2,
    "eval.every_steps": 2,
    "eval.metric": "digits",
    "data.validation.limit": 16,
    "data.test.limit": 8,
    "checkpoint.every_steps": 2,
    "wandb.mode": "disabled",
    "faults.silent_s": 5,
    "faults.restarts": 5,
    "budget.steps": 12,
}


@dataclass(frozen=True)
class Fault:
    """A signal in a phase.

    Attributes:
        phase: see `PHASES`.
        delay_s: seconds after the phase begins; a shorter phase gets it sooner the next time.
    """

    phase: str
    delay_s: float


def planned(role: str, *, seed: int = SEED) -> dict[str, list[Fault]]:
    """The faults of a role's runs, by signal.

    All roles together meet each phase with each signal.
    """
    draw, number = random.Random(f"{seed} {role}"), list(ROLES).index(role)
    starting = draw.sample(ROLES[role].starting, len(ROLES[role].starting))
    others = [phase for phase in PHASES if phase not in STARTING]
    dealt = draw.sample(others, len(others))
    found = dict[str, list[Fault]]()
    for place in range(len(SIGNALS)):
        mine = starting[place % len(starting)] if starting else None
        phases = {mine, *dealt[place :: len(SIGNALS)]}
        found[SIGNALS[(place + number) % len(SIGNALS)]] = [
            Fault(phase, draw.uniform(0, _LONGEST_DELAY_S)) for phase in PHASES if phase in phases
        ]
    return found


def measure(*, role: str) -> Figures:
    """Runs with faults, one for each signal, at the same time.

    Args:
        role: a key of `ROLES`; "": one run without faults.
    """
    began = time.perf_counter()
    plans = planned(role) if role else {SIGNALS[0]: []}
    with ThreadPoolExecutor(len(plans)) as pool:
        runs = list(pool.map(lambda name: _figures(role, name, plans[name]), plans))
    cells = [(name, *cell) for name, run in zip(plans, runs, strict=True) for cell in run["cells"]]
    outcomes = Counter(outcome for _, _, outcome, _ in cells)
    return {
        **{
            phase: "; ".join(
                f"{name.removeprefix('SIG')} {outcome} {seconds:.0f} s"
                for name, at, outcome, seconds in cells
                if at == phase
            )
            for phase in PHASES
        },
        **{outcome: outcomes[outcome] for outcome in _OUTCOMES},
        "slowest_s": max((seconds for *_, seconds in cells), default=0.0),
        "result": ", ".join(sorted({run["result"] for run in runs})),
        "left": ", ".join(sorted({run["left"] for run in runs})),
        "seconds": time.perf_counter() - began,
    }


def _figures(role: str, name: str, faults: list[Fault]) -> dict[str, Any]:
    """A run with faults of one signal."""
    with tempfile.TemporaryDirectory(prefix="c") as scratch:
        run = _Run(Path(scratch), ROLES.get(role, Role("$^")), signal.Signals[name])
        try:
            cells = list(run.run(faults))
        finally:
            run.end()
        return {"cells": cells, "result": run.result, "left": ", ".join(run.left()) or "nothing"}


class _Run:
    """A run in a folder of its own."""

    def __init__(self, scratch: Path, role: Role, number: signal.Signals) -> None:
        self._role, self._number = role, number
        self._log = scratch / "log"
        self._temporary = scratch / "t"
        self._temporary.mkdir()
        (scratch / "planted_rewards.py").write_text(_REWARDS)
        (scratch / "sitecustomize.py").write_text("import launch.bench.phase_reports\n")
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._reports.bind(str(scratch / "reports"))
        self._mark, project = uuid.uuid4().hex, Path(configs.__file__).parents[1]
        self._environment = os.environ | {
            _MARK: self._mark,
            REPORTS: str(scratch / "reports"),
            "TMPDIR": str(self._temporary),
            "PYTHONPATH": f"{scratch}:{project}",
        }
        settings = {**_SETTINGS, **role.settings}.items()
        self._command = [
            *(sys.executable, "-m", "launch.train", f"{project}/configs/demo.toml"),
            *(
                f"--{key}={str(value).format(scratch=scratch, pause_s=role.pause_s)}"
                for key, value in settings
            ),
            "--supervise",
        ]
        self._folder = RunFolder(scratch / "run")
        self._victim: psutil.Process | None = None
        self._left = list[str]()
        self._starts = 0
        self._process = self._start()

    def run(self, faults: list[Fault]) -> Iterator[tuple[str, str, float]]:
        """Runs until the end; yields phase, outcome and seconds to the next step of each fault."""
        for fault in faults:
            before = self._starts, self._restarts
            sent_s = self._inject(fault)
            if sent_s is None:
                yield fault.phase, "not sent", 0.0
                continue
            self._wait_for_step(fault, before)
            outcome = "restarted" if self._restarts > before[1] else "in place"
            outcome = "given again" if self._starts > before[0] else outcome
            yield fault.phase, outcome, time.monotonic() - sent_s
        while self._process.wait() in _ENDED:
            self._process = self._start()

    @property
    def result(self) -> str:
        """What faults must not change: a hash of last and best adapter and of all rollout files."""
        if self._process.returncode:
            lines = self._log.read_text().splitlines()
            return f"status {self._process.returncode}: {lines[-1] if lines else ''}"
        summary = self._folder.summary or {}
        found = [summary.get("adapter_sha256"), (summary.get("best") or {}).get("adapter_sha256")]
        files = sorted(self._folder.rollouts.iterdir())
        kept = [path for path in files if ".superseded" not in path.suffixes]
        found += [f"{path.name} {path.read_bytes()!r}" for path in kept]
        return hashlib.sha256(repr(found).encode()).hexdigest()[:12]

    def left(self) -> Iterator[str]:
        """Processes and temporary files that are left."""
        yield from self._left
        yield from (path.name for path in self._temporary.iterdir())
        yield from (
            path.name
            for path in self._folder.path.rglob("*tmp*")
            if "wandb" not in path.parts  # whose files wait for their upload
        )

    def end(self) -> None:
        """Kills the processes that are left."""
        _, alive = psutil.wait_procs(self._processes(), timeout=_END_S)
        self._left = [_command_line(one)[:80] for one in alive]
        for one in alive:
            with suppress(psutil.Error):
                one.kill()
        self._process.wait()
        self._reports.close()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._starts:
            psutil.wait_procs(self._processes(), timeout=_END_S)
        self._starts += 1
        with self._log.open("a") as output:
            return subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )

    def _inject(self, fault: Fault) -> float | None:
        """Sends the signal in the phase of a fault; None: the phase or the process never came."""
        delay_s = fault.delay_s
        self._lasts(None, 0.0)  # forgets what was reported before
        while self._process.poll() is None:
            pid, phase = self._report(_POLL_S)
            if phase not in PHASES[fault.phase]:
                continue
            while (victim := self._working()) is None:
                self._victim = next(iter(self._processes(self._role.pattern)), None)
                if self._working() is None and not self._lasts(pid, _POLL_S):
                    break  # it has not been started when the phase ends
            if victim is not None and self._lasts(pid, delay_s):
                with suppress(psutil.Error):
                    victim.send_signal(self._number)
                    return time.monotonic()
            delay_s /= 2
        return None

    def _working(self) -> psutil.Process | None:
        """The last victim, if it can get another signal."""
        with suppress(psutil.NoSuchProcess):
            if self._victim is not None and self._victim.status() not in _GONE:
                return self._victim
        return None

    def _report(self, timeout_s: float) -> tuple[str, str]:
        """The next report of a process: its pid and phase; empty: there is none."""
        self._reports.settimeout(timeout_s)
        with suppress(TimeoutError, BlockingIOError):
            pid, _, phase = self._reports.recv(256).decode().partition(" ")
            return pid, phase
        return "", ""

    def _lasts(self, pid: str | None, seconds: float) -> bool:
        """Whether a process stays in its phase for some time."""
        end_s = time.monotonic() + seconds
        while (found := self._report(max(0.0, end_s - time.monotonic())))[0]:
            if found[0] == pid:
                return False
        return True

    def _wait_for_step(self, fault: Fault, before: tuple[int, int]) -> None:
        """Waits for the next training step or the end; gives a command again that has ended.

        Args:
            fault: that was injected.
            before: starts of the command, and by its supervisor, before the fault.
        """
        is_stopped_supervisor = (self._role, self._number) == (ROLES["supervisor"], signal.SIGSTOP)
        # A start of Ray that fails is repeated by the same process.
        ends = self._role.is_essential and not is_stopped_supervisor and fault.phase != "waiting"
        if is_stopped_supervisor:
            time.sleep(_CONTINUED_S)
            self._process.send_signal(signal.SIGCONT)
        least = self._steps
        while True:
            status, steps = self._process.poll(), self._steps
            # Not a step of the process that is about to end; a resume repeats steps.
            is_old = ends and (self._starts, self._restarts) == before
            least = steps if is_old else min(least, steps)
            if status in _ENDED:
                self._process = self._start()
            elif status is not None or steps > least:
                return
            time.sleep(_POLL_S)

    @property
    def _steps(self) -> int:
        with suppress(OSError):
            return (self._folder.path / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    @property
    def _restarts(self) -> int:
        """Starts of the run's process by its supervisor."""
        return self._log.read_text().count("; it is started again")

    def _processes(self, pattern: str = "") -> list[psutil.Process]:
        """The processes of the run, by the mark in their environment; the oldest first."""
        found = []
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                is_role = re.search(pattern, _command_line(one))
                if is_role and one.environ().get(_MARK) == self._mark:
                    found.append(one)
        return sorted(found, key=psutil.Process.create_time)


def _command_line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    done = {name: figures for name, figures in found.items() if "result" in figures}
    results = [figures["result"] for figures in done.values()]
    for name, figures in done.items():
        same = figures["result"] == results[0]
        yield Claim(f"{name}: adapters and rollouts of the first row ({figures['result']})", same)
        yield Claim(f"{name}: nothing is left ({figures['left']})", figures["left"] == "nothing")
    if found.keys() == {"undisturbed", *ROLES}:
        sent = sum(figures[outcome] for figures in done.values() for outcome in _OUTCOMES[:-1])
        yield Claim(f"{sent} faults were sent (at least {LEAST})", sent >= LEAST)


BENCHMARK = Benchmark(
    [
        Section(
            "chaos",
            "Signals to the processes of small runs, by the phase of the run: what became of its "
            "process, and the seconds to the next training step or the end",
            [
                Row("undisturbed", measure, {"role": ""}),
                *(Row(role, measure, {"role": role}) for role in ROLES),
            ],
            [_claims],
            environment={},
        )
    ]
)
