"""Compares ways to keep slots in use on the demo's task, with the same time budget.

    python -m launch.demo.slots_table [--seeds 0 1 2] [--time 3m] [--ways NAME ...]

Makes the comparison in docs/benchmarks.md: all rollouts of a step in slots of their own, fewer
slots that are filled again, partial rollouts, twice the prompts, and rollouts one step ahead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from launch.demo.table import DemoRun, train
from launch.flags import add_runs_dir, add_seeds
from pipeline.evaluate.summary import show_mean

_CAPPED = ("--learner.importance_cap", "2")
WAYS: dict[str, tuple[str, ...]] = {
    "192 slots": (),
    "96 slots": ("--plan.slots", "96"),
    "partial": ("--rollout.partial", "keep", "--rollout.cut_off", "0.75", *_CAPPED),
    "48 prompts": ("--rollout.prompts_per_step", "48"),
    "ahead": ("--rollout.ahead", "one", *_CAPPED),
}
"""Settings besides those of the demo."""
HEADER = (
    "| | seed | steps | trained tokens | slots in use | before | after | difference [95%] |\n"
    "|---|---|---|---|---|---|---|---|"
)


def row(name: str, seed: int, run: DemoRun) -> str:
    """Returns a Markdown row.

    Raises:
        RuntimeError: if the run failed.
    """
    summary = run.summary
    found, useful = summary["eval"], [one["rollout/slots_useful"] for one in run.folder.metrics]
    low, high = found["paired_ci95"]
    return (
        f"| {name} | {seed} | {summary['steps']} | {summary['tokens_trained']:,} "
        f"| {statistics.mean(useful):.0%} | {show_mean(found['before'])} "
        f"| {show_mean(found['after'])} | {100 * found['paired_difference']:+.1f} "
        f"[{100 * low:+.1f}, {100 * high:+.1f}] |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all seeds in all ways, in turns, and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.slots_table",
        description="Compare ways to keep slots in use on the demo's task, with the same time.",
    )
    add_seeds(parser)
    parser.add_argument("--time", default="3m", help="time budget of each run (default: 3m)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    add_runs_dir(parser)
    options = parser.parse_args(argv)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    budget = ("--budget.steps", "none", "--budget.time", options.time)
    rows = []
    for seed in options.seeds:
        for name in options.ways:
            run = train(
                f"slots-{name.replace(' ', '-')}-seed{seed}-{stamp}",
                folder=options.dir,
                settings=[*budget, "--run.seed", str(seed), *WAYS[name]],
            )
            rows.append(row(name, seed, run))
    print("\n".join([HEADER, *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
