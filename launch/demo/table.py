"""Runs the demo with several seeds and its control; makes the table of the README.

    python -m launch.demo.table [--seeds 0 1 2] [--steps N] [--dir runs]

The control is the same run with rewards shuffled within each step: equally many and equally large
updates without information on the rollouts. If its accuracy rose, too, the gain would not come from
the rewards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launch.flags import add_runs_dir, add_seeds

CONFIG = "configs/demo.toml"
_SAMPLE_EVERY_S = 2.0
"""Interval of memory readings, each of which costs the kernel some time."""
HEADER = (
    "| run | accuracy before | after | difference [95%] | paired p | well formed before "
    "| exported step of | validation, exported and last | minutes | GiB at peak |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    """One run of the table.

    Attributes:
        name: of the run.
        summary: its `summary.json`.
        minutes: time from start to exit.
        peak_gib: peak of the summed proportional set size of its processes.
    """

    name: str
    summary: dict[str, Any]
    minutes: float
    peak_gib: float

    def __str__(self) -> str:
        """A Markdown row."""
        found, best = self.summary["eval"], self.summary["best"]
        before, after = found["before"], found["after"]
        low, high = found["paired_ci95"]
        return (
            f"| {self.name} | {_share(before)} | {_share(after)} "
            f"| {100 * found['paired_difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] "
            f"| {found['paired_p']:.1e} | {100 * before['well_formed']:.1f}% "
            f"| {best['step']} of {best['last_step']} "
            f"| {100 * best['accuracy']:.1f}%, {100 * best['last_accuracy']:.1f}% "
            f"| {self.minutes:.1f} | {self.peak_gib:.1f} |"
        )


def _share(found: dict[str, Any]) -> str:
    return f"{100 * found['accuracy']:.1f}%"


def run(name: str, *, seed: int, folder: Path, settings: Sequence[str]) -> Row:
    """Runs the demo once in a separate process and measures it.

    Raises:
        RuntimeError: if the run fails.
    """
    command = [sys.executable, "-m", "launch.train", CONFIG]
    command += ["--run.seed", str(seed), "--run.name", name, "--run.dir", str(folder), *settings]
    started = time.monotonic()
    process = subprocess.Popen(command)
    peak = _PeakMemory(process.pid)
    status = process.wait()
    peak.stop()
    if status != 0:
        raise RuntimeError(f"{name}: exit status {status} of {' '.join(command)}")
    summary = json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))
    return Row(name, summary, (time.monotonic() - started) / 60, peak.gib)


class _PeakMemory:
    """Samples the memory of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def gib(self) -> float:
        return self._bytes / 2**30

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_EVERY_S):
            self._bytes = max(self._bytes, _pss(self._pid))


def _pss(pid: int) -> int:
    """Summed proportional set size, which counts shared memory once."""
    total = 0
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all seeds and the control and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.table",
        description="Run the demo with several seeds and its control, and print a table.",
    )
    add_seeds(parser)
    parser.add_argument("--steps", type=int, help="steps of each run (default: the preset's)")
    add_runs_dir(parser)
    options = parser.parse_args(argv)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    settings = [] if options.steps is None else ["--budget.steps", str(options.steps)]
    plans: list[tuple[str, int, list[str]]] = [
        (f"demo-seed{seed}-{stamp}", seed, settings) for seed in options.seeds
    ]
    control = [*settings, "--rewards.shuffle", "true"]
    plans.append((f"demo-control-{stamp}", options.seeds[0], control))
    rows = [run(name, seed=seed, folder=options.dir, settings=more) for name, seed, more in plans]
    print(HEADER)
    for row in rows:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
