"""Runs the demo with several seeds and its control; makes the table in docs/benchmarks.md.

    python -m launch.demo.table [--config CONFIG.toml] [--seeds 0 1 2] [--steps N] [--dir runs]

The control is the same run with rewards shuffled within each step: equally many and equally large
updates without information on the rollouts. If its accuracy rose, too, the gain would not come from
the rewards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launch.flags import add_runs_dir, add_seeds
from pipeline.evaluate.summary import show_mean
from pipeline.run.run_folder import RunFolder

CONFIG = "configs/demo.toml"
_SAMPLE_EVERY_S = 2.0
"""Interval of memory readings, each of which costs the kernel some time."""
HEADER = (
    "| run | accuracy before | after | difference [95%] | paired p | well formed before "
    "| exported step of | validation, exported and last | minutes | GiB at peak |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class DemoRun:
    """A run of the demo that has ended.

    Attributes:
        name: of the run.
        status: exit status of its process.
        seconds: time from start to exit.
        peak_gib: peak of the summed proportional set size of its processes, which counts shared
            memory once.
        folder: the run folder.
    """

    name: str
    status: int
    seconds: float
    peak_gib: float
    folder: RunFolder

    @property
    def summary(self) -> dict[str, Any]:
        """Its `summary.json`.

        Raises:
            RuntimeError: if the run failed.
        """
        if self.status or self.folder.summary is None:
            raise RuntimeError(f"{self.name}: exit status {self.status}")
        return self.folder.summary


def train(name: str, *, folder: Path, settings: Sequence[str], config: str = CONFIG) -> DemoRun:
    """Runs the demo once in a separate process with further settings, and measures it."""
    command = [sys.executable, "-m", "launch.train", config, "--run.name", name]
    started, peak = time.monotonic(), 0
    process = subprocess.Popen([*command, "--run.dir", str(folder), *settings])
    while True:
        try:
            status = process.wait(timeout=_SAMPLE_EVERY_S)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, _memory(process.pid))
    seconds = time.monotonic() - started
    return DemoRun(name, status, seconds, peak / 2**30, RunFolder(folder / name))


def _memory(pid: int) -> int:
    """Bytes of a process and its descendants; 0 if it has just ended."""
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


def row(run: DemoRun) -> str:
    """Returns a Markdown row.

    Raises:
        RuntimeError: if the run failed.
    """
    found, best = run.summary["eval"], run.summary["best"]
    before, after = found["before"], found["after"]
    low, high = found["paired_ci95"]
    return (
        f"| {run.name} | {show_mean(before)} | {show_mean(after)} "
        f"| {100 * found['paired_difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] "
        f"| {found['paired_p']:.1e} | {before['well_formed']:.1%} "
        f"| {best['step']} of {best['last_step']} "
        f"| {best['accuracy']:.1%}, {best['last_accuracy']:.1%} "
        f"| {run.seconds / 60:.1f} | {run.peak_gib:.1f} |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all seeds and the control and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.table",
        description="Run the demo with several seeds and its control, and print a table.",
    )
    parser.add_argument("--config", default=CONFIG, help=f"default: {CONFIG}")
    add_seeds(parser)
    parser.add_argument("--steps", type=int, help="steps of each run (default: the preset's)")
    add_runs_dir(parser)
    options = parser.parse_args(argv)
    stamp, base = time.strftime("%Y%m%d-%H%M%S"), Path(options.config).stem
    settings = [] if options.steps is None else ["--budget.steps", str(options.steps)]
    shuffled = ("--rewards.shuffle", "true")
    plans: list[tuple[str, int, tuple[str, ...]]] = [
        *((f"{base}-seed{seed}-{stamp}", seed, ()) for seed in options.seeds),
        (f"{base}-control-{stamp}", options.seeds[0], shuffled),
    ]
    rows = [
        row(
            train(
                name,
                folder=options.dir,
                settings=["--run.seed", str(seed), *settings, *more],
                config=options.config,
            )
        )
        for name, seed, more in plans
    ]
    print("\n".join([HEADER, *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
