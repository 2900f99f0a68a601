"""Compares GRPO alone with SFT then GRPO from a less trained base, with the same time budget.

    python -m launch.demo.warm_start [--seeds 0 1 2] [--time 4m] [--base DIR]

Makes the comparison in docs/benchmarks.md. The base is pretrained for 600 steps instead of 900,
which takes about 14 minutes on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.demo.table import HEADER, row, train
from launch.flags import add_runs_dir, add_seeds

BASE_STEPS = 600
SFT_STEPS = 30
SFT_SETTINGS = (
    *("--run.phases", '["sft", "grpo"]'),
    *("--sft.train.path", "launch/demo/data/demonstrations.jsonl"),
    *("--sft.steps", str(SFT_STEPS), "--sft.lr", "1.2e-3", "--sft.warmup_steps", "3"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all seeds both ways and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.warm_start",
        description="Compare GRPO alone with SFT then GRPO on the demo's task, with the same time.",
    )
    add_seeds(parser)
    parser.add_argument("--time", default="4m", help="time budget of each run (default: 4m)")
    parser.add_argument("--base", type=Path, help="the less trained base (default: a new one)")
    add_runs_dir(parser)
    options = parser.parse_args(argv)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = options.base
    if base is None:
        base = options.dir / f"warm-start-base-{stamp}"
        command = [sys.executable, "-m", "launch.demo.tiny", "--out", str(base)]
        subprocess.run([*command, "--steps", str(BASE_STEPS)], check=True)
    settings = ["--model.path", str(base), "--budget.steps", "none", "--budget.time", options.time]
    rows = [
        row(
            train(
                f"{kind}-seed{seed}-{stamp}",
                folder=options.dir,
                settings=[*settings, "--run.seed", str(seed), *more],
            )
        )
        for seed in options.seeds
        for kind, more in (("grpo", ()), ("sft-grpo", SFT_SETTINGS))
    ]
    print("\n".join([HEADER, *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
