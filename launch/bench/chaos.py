"""Faults in small runs: whether the run survives them and ends with the undisturbed adapter.

Each row is a run of the demo's model by `launch.train --supervise`. One of its processes gets a
signal in several phases of the driver, which the row's seed draws. A phase is what `status.json`
says: a short one may have ended when the signal arrives.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import configs
from launch.bench.harness import Benchmark, Claim, Figures, Row, Section
from pipeline.run.run_folder import RunFolder

ROLES: Mapping[str, str] = {
    "sampler": r"^ray::.*SamplerActor",
    "learner": r"^ray::.*LearnerActor",
    "rewards": r"^ray::.*RewardActor",
    "reward process": r"rewards\.processes",
    "driver": r"launch\.train (?!.*--supervise)",
    "raylet": r"/raylet ",
    "gcs": r"/gcs_server ",
}
"""A pattern of the command line of each role's process."""
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
PHASES = (
    "loading",
    "calibration",
    "sample",
    "reward",
    "learn",
    "checkpoint",
    "evaluation",
    "export",
)
UNDISTURBED = "undisturbed"
FAULTS = 5
"""Faults of a row."""
_VARIABLE = "GEMMA_GRPO_CHAOS"
"""Environment variable that marks the processes of a run."""
_POLL_S = 0.02
_LONGEST_DELAY_S = 0.3
_END_S = 5.0
"""Processes that a run has left get some time to end."""
_REWARDS = """
import time

def digits(completion):
    time.sleep(0.02)
    return sum(map(ord, completion)) % 7 / 6
"""
_SETTINGS: Mapping[str, Any] = {
    "run.name": "run",
    "rollout.prompts_per_step": 4,
    "plan.fixed": "true",
    "plan.slots": 32,
    "plan.prefill_tokens": 208,
    "plan.micro_batch_tokens": 1536,
    "plan.sampler_devices": 1,
    "plan.learner_devices": 1,
    "learner.updates_per_batch": 2,
    "eval.every_steps": 2,
    "data.validation.limit": 32,
    "data.test.limit": 8,
    "checkpoint.every_steps": 2,
    "wandb.mode": "disabled",
    "faults.silent_s": 5,
    "faults.restarts": 5,
    "budget.steps": 12,
}


@dataclass(frozen=True)
class Fault:
    """A signal to a process in a phase of the driver.

    Attributes:
        phase: see `PHASES`.
        delay_s: seconds between the first sight of the phase and the signal.
        after: training steps that are done before.
    """

    phase: str
    delay_s: float
    after: int


def faults(seed: int) -> list[Fault]:
    """The faults of a row, in the order of their steps."""
    draw = random.Random(seed)
    phases = draw.sample(PHASES, FAULTS)
    steps = sorted(draw.sample(range(10), FAULTS))
    # A start is loading and calibration; later faults make starts.
    phases.sort(key=lambda phase: phase not in {"loading", "calibration"})
    delays = (draw.uniform(0, _LONGEST_DELAY_S) for _ in phases)
    return [
        Fault(phase, delay_s, 0 if number == 0 else after)
        for number, (phase, delay_s, after) in enumerate(zip(phases, delays, steps, strict=True))
    ]


def measure(*, role: str, name: str, seed: int) -> Figures:
    """Runs with faults.

    Args:
        role: a key of `ROLES`; "": without faults.
        name: of the signal.
        seed: draws the phases.
    """
    with tempfile.TemporaryDirectory(prefix="c") as folder:
        began, run = time.perf_counter(), _Run(Path(folder))
        planned = faults(seed) if role else []
        done = run.finish(ROLES.get(role, "$^"), signal.Signals[name], planned)
        return {
            **done,
            "result": _result(run.folder),
            "left": ", ".join(run.left()) or "nothing",
            "seconds": time.perf_counter() - began,
        }


def _result(folder: RunFolder) -> str:
    """What faults must not change: a hash of last and best adapter and of all rollout files."""
    summary = folder.summary or {}
    found = [summary.get("adapter_sha256"), (summary.get("best") or {}).get("adapter_sha256")]
    found += [f"{path.name} {path.read_bytes()!r}" for path in sorted(folder.rollouts.iterdir())]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:12]


class _Run:
    """A run in a folder of its own."""

    def __init__(self, scratch: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._temporary = Path(tempfile.mkdtemp(prefix="c"))
        self._log = scratch / "log"
        self._starts = 0
        rewards = scratch / "planted_rewards.py"
        rewards.write_text(_REWARDS)
        function = f"{{name = 'digits', function = '{rewards}:digits'}}"
        settings = {**_SETTINGS, "run.dir": scratch, "rewards.functions": f"[{function}]"}
        settings |= {"eval.metric": "digits"}
        arguments = [f"--{key}={value}" for key, value in settings.items()]
        demo = Path(configs.__file__).parent / "demo.toml"
        self._command = [sys.executable, "-m", "launch.train", str(demo), *arguments, "--supervise"]
        self.folder = RunFolder(scratch / "run")

    def finish(self, pattern: str, number: int, planned: list[Fault]) -> dict[str, Any]:
        """Runs with faults until the end; returns figures by phase.

        Raises:
            RuntimeError: if the run fails, with the end of its output.
        """
        survived = {"in place": 0, "restarted": 0, "no effect": 0, "not hit": 0}
        seconds, cells = list[float](), dict[str, str]()
        process = self._start()
        try:
            for fault in planned:
                before = self._deaths()
                began_s = self._inject(process, pattern, number, fault)
                if began_s is None:
                    outcome = "not hit"
                else:
                    process = self._after(process)
                    after = self._deaths()
                    names = ("restarted", "in place")
                    changed = [
                        n for n, old, new in zip(names, before, after, strict=True) if new > old
                    ]
                    outcome = changed[0] if changed else "no effect"
                    seconds.append(time.monotonic() - began_s)
                survived[outcome] += 1
                cells[fault.phase] = outcome + (f" {seconds[-1]:.0f} s" if began_s else "")
            while (status := process.wait()) == 128 + signal.SIGTERM:
                process = self._start()
        finally:
            for one in self._processes():
                with suppress(psutil.Error):
                    one.kill()
            process.wait()
        if status:
            raise RuntimeError(self._log.read_text()[-2000:])
        longest = max(seconds, default=0.0)
        return {
            **{phase: cells.get(phase, "") for phase in PHASES},
            **survived,
            "slowest_s": longest,
        }

    def _start(self) -> subprocess.Popen[bytes]:
        self._starts += 1
        environment = os.environ | {_VARIABLE: self._mark, "TMPDIR": str(self._temporary)}
        with self._log.open("a") as output:
            return subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def _inject(
        self, process: subprocess.Popen[bytes], pattern: str, number: int, fault: Fault
    ) -> float | None:
        """Sends the signal in the phase of a fault; None: the phase or the process never came."""
        while process.poll() is None:
            if self._phase() == fault.phase and self._steps() >= fault.after:
                time.sleep(fault.delay_s)
                victims = [
                    one for one in self._processes() if re.search(pattern, _command_line(one))
                ]
                for victim in victims:
                    with suppress(psutil.Error):
                        victim.send_signal(number)
                if victims:
                    return time.monotonic()
            time.sleep(_POLL_S)
        return None

    def _after(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Waits for the next training step or the end; starts a stopped command again."""
        least = self._steps()
        while True:
            status = process.poll()
            if status == 128 + signal.SIGTERM:
                process = self._start()
            elif status is not None:
                return process
            steps = self._steps()
            least = min(least, steps)  # a resume repeats steps
            if steps > least:
                return process
            time.sleep(_POLL_S)

    def _phase(self) -> str:
        with suppress(OSError, ValueError):
            return str(json.loads(self.folder.status.read_bytes())["phase"])
        return ""

    def _steps(self) -> int:
        with suppress(OSError):
            return (self.folder.path / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def _deaths(self) -> tuple[int, int]:
        """Starts of the command, and deaths that its process survived."""
        text = self._log.read_text()
        again = text.count("; it is started again")
        return self._starts + again, len(re.findall("; (it is|all processes are) restarted", text))

    def _processes(self) -> list[psutil.Process]:
        """The processes of the run, by the mark in their environment."""
        found = []
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                if one.environ().get(_VARIABLE) == self._mark:
                    found.append(one)
        return found

    def left(self) -> Iterator[str]:
        """Processes and temporary files that the run has left."""
        _, alive = psutil.wait_procs(self._processes(), timeout=_END_S)
        yield from (_command_line(one)[:80] for one in alive)
        yield from (path.name for path in self._temporary.iterdir())
        yield from (str(path.name) for path in self.folder.path.rglob("*tmp*"))
        shutil.rmtree(self._temporary)


def _command_line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    done = {name: figures for name, figures in found.items() if "result" in figures}
    results = [figures["result"] for figures in done.values()]
    for name, figures in done.items():
        same = figures["result"] == results[0]
        yield Claim(
            f"{name}: the adapters and rollouts of the first row ({figures['result']})", same
        )
        hits = figures["in place"] + figures["restarted"] + figures["no effect"]
        yield Claim(f"{name}: {hits} faults", hits > 0 or name == UNDISTURBED)
        yield Claim(f"{name}: nothing is left ({figures['left']})", figures["left"] == "nothing")


BENCHMARK = Benchmark(
    [
        Section(
            "chaos",
            "Signals to the processes of small runs, by the phase of the driver: what became of "
            "the run, and the seconds to its next training step",
            [
                Row(UNDISTURBED, measure, {"role": "", "name": SIGNALS[0], "seed": 0}),
                *(
                    Row(
                        f"{role}, {name}",
                        measure,
                        {"role": role, "name": name, "seed": 10 * number + place},
                    )
                    for number, role in enumerate(ROLES)
                    for place, name in enumerate(SIGNALS)
                ),
            ],
            [_claims],
            environment={},
        )
    ]
)
