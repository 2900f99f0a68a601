"""Accuracy against time: the demo with the smallest time budget, twice and four times that.

    python -m launch.demo.deadline_table [--seeds 0 1 2] [--minimum 2m] [--dir runs]

A run with a far too small budget is refused with the minimum, as measured on this machine; the
minimum counts once a run with it succeeds. Each run has a cosine decay that ends with the budget.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from configs.base import parse_duration_s
from launch.demo.table import train
from launch.exits import EXIT_MISTAKE
from launch.flags import add_json, add_runs_dir, add_seeds, json_file
from pipeline.deadline import show_duration
from pipeline.evaluate.significance import measure_accuracy
from pipeline.evaluate.summary import show_mean

FACTORS = (1, 2, 4)
_TOO_SMALL_S = 40
_SETTINGS = (
    *("--budget.steps", "none"),
    *("--learner.schedule", "cosine"),
    *("--rollout.min_prompts_per_step", "8"),
    *("--eval.every_steps", "10"),
)
HEADER = (
    "| budget | seed | steps | used | in time | accuracy before | after | exported step |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        budget_s: its time budget.
        seed: of the run.
        summary: its `summary.json`.
        answers: whether the final answer to each prompt of the test split is correct, by prompt.
        process_s: time from start to exit of the process.
    """

    budget_s: int
    seed: int
    summary: dict[str, Any]
    answers: dict[int, bool]
    process_s: float

    def __str__(self) -> str:
        """A Markdown row."""
        before = show_mean(self.summary["eval"]["before"])
        after = sum(self.answers.values()) / len(self.answers)
        in_time = "yes" if self.process_s <= self.budget_s else "no"
        return (
            f"| {show_duration(self.budget_s)} | {self.seed} | {self.summary['steps']} "
            f"| {show_duration(self.process_s)} | {in_time} | {before} | {after:.1%} "
            f"| {self.summary['best']['step']} |"
        )


def find_minimum_s(*, folder: Path, stamp: str) -> int:
    """Finds the smallest budget: each refused run names the next one, until a run succeeds.

    Raises:
        RuntimeError: if a run fails for another reason.
    """
    budget_s = _TOO_SMALL_S
    while True:
        time_budget = show_duration(budget_s)
        name = f"deadline-minimum-{time_budget}-{stamp}"
        done = train(name, folder=folder, settings=[*_SETTINGS, "--budget.time", time_budget])
        if done.status == 0:
            return budget_s
        refused = list(done.folder.events("refused"))
        if done.status != EXIT_MISTAKE or not refused:
            raise RuntimeError(f"{name}: exit status {done.status}")
        budget_s = ceil(refused[-1]["minimum_s"])


def run(budget_s: int, *, seed: int, folder: Path, stamp: str) -> Row:
    """Runs the demo with a time budget.

    Raises:
        RuntimeError: if the run fails.
    """
    time_budget = show_duration(budget_s)
    name = f"deadline-{time_budget}-seed{seed}-{stamp}"
    settings = [*_SETTINGS, "--budget.time", time_budget, "--run.seed", str(seed)]
    done = train(name, folder=folder, settings=settings)
    summary = done.summary
    tests = [entry for entry in done.folder.events("evaluated") if entry["name"] == "test_after"]
    if not tests:
        raise RuntimeError(f"{name}: no time was left to evaluate the export")
    rows = done.folder.read_rollouts(tests[-1]["file"])
    answers = {row["prompt_id"]: bool(row["correct"]) for row in rows}
    return Row(budget_s, seed, summary, answers, done.seconds)


def mean_line(rows: Sequence[Row]) -> str:
    """Returns the mean over the seeds of one budget, on the prompts that all of them answered.

    The confidence interval treats the seeds' answers to one prompt like samples of one policy.
    """
    prompts = set.intersection(*(set(row.answers) for row in rows))
    answers = [[row.answers[prompt] for row in rows] for prompt in sorted(prompts)]
    found = measure_accuracy(np.array(answers))
    low, high = (100 * bound for bound in found.ci95)
    budget = show_duration(rows[0].budget_s)
    return f"{budget}: mean accuracy {found.accuracy:.1%} [{low:.1f}, {high:.1f}]"


def _duration_s(text: str) -> int:
    try:
        return parse_duration_s(text)
    except ValueError as mistake:
        raise argparse.ArgumentTypeError(str(mistake)) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all budgets and seeds and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.deadline_table",
        description="Run the demo with the smallest time budget, twice and four times that.",
    )
    add_seeds(parser)
    parser.add_argument(
        "--minimum", type=_duration_s, help="the smallest budget (default: found by runs)"
    )
    add_runs_dir(parser)
    add_json(parser)
    options = parser.parse_args(argv)
    try:
        file = json_file(options)
    except ValueError as mistake:
        parser.error(str(mistake))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    minimum_s = options.minimum or find_minimum_s(folder=options.dir, stamp=stamp)
    table = [
        [
            run(factor * minimum_s, seed=seed, folder=options.dir, stamp=stamp)
            for seed in options.seeds
        ]
        for factor in FACTORS
    ]
    rows = [row for budget in table for row in budget]
    print("\n".join([HEADER, *map(str, rows), *map(mean_line, table)]))
    if file is not None:
        summaries = [{"seed": row.seed, **row.summary} for row in rows]
        file.write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
