"""Runs the demo with several seeds and its control; makes the table in docs/benchmarks.md.

    python -m launch.demo.table [--config CONFIG.toml] [--seeds 0 1 2] [--dir runs]
                                [--table.key VALUE ...]

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
from pathlib import Path

from launch.peak_memory import PeakMemory
from pipeline.evaluate.summary import show_mean
from pipeline.run.run_folder import RunFolder

CONFIG = "configs/demo.toml"
HEADER = (
    "| run | accuracy before | after | difference [95%] | paired p | well formed before "
    "| exported step of | validation, exported and last | minutes | GiB at peak |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def run(config: str, name: str, *, folder: Path, settings: Sequence[str]) -> str:
    """Runs a configuration in a separate process with further settings; returns a Markdown row.

    Raises:
        RuntimeError: if the run failed.
    """
    command = [sys.executable, "-m", "launch.train", config, "--run.name", name]
    started = time.monotonic()
    with PeakMemory() as peak:
        done = subprocess.run([*command, "--run.dir", str(folder), *settings], check=False)
    minutes, summary = (time.monotonic() - started) / 60, RunFolder(folder / name).summary
    if done.returncode or summary is None:
        raise RuntimeError(f"{name}: exit status {done.returncode}")
    found, best = summary["eval"], summary["best"]
    before, after = found["before"], found["after"]
    low, high = found["paired_ci95"]
    return (
        f"| {name} | {show_mean(before)} | {show_mean(after)} "
        f"| {100 * found['paired_difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] "
        f"| {found['paired_p']:.1e} | {before['well_formed']:.1%} "
        f"| {best['step']} of {best['last_step']} "
        f"| {best['accuracy']:.1%}, {best['last_accuracy']:.1%} "
        f"| {minutes:.1f} | {peak.bytes / 2**30:.1f} |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all seeds and the control and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.table",
        description="Run the demo with several seeds and its control, and print a table. Other "
        "arguments are settings of all runs: --table.key VALUE.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default=CONFIG, help=f"default: {CONFIG}")
    parser.add_argument(
        "--seeds", metavar="SEED", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("runs"), help="parent of the run folders (default: runs)"
    )
    options, settings = parser.parse_known_args(argv)
    stamp, base = time.strftime("%Y%m%d-%H%M%S"), Path(options.config).stem
    plans = [(f"{base}-seed{seed}-{stamp}", seed, "false") for seed in options.seeds]
    plans.append((f"{base}-control-{stamp}", options.seeds[0], "true"))
    rows = [
        run(
            options.config,
            name,
            folder=options.dir,
            settings=["--run.seed", str(seed), "--rewards.shuffle", shuffled, *settings],
        )
        for name, seed, shuffled in plans
    ]
    print("\n".join([HEADER, *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
