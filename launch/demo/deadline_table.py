"""What time buys: the demo with the smallest budget of time that does, twice and four times that.

    python -m launch.demo.deadline_table [--seeds 0 1 2] [--minimum 2m] [--dir runs]

A run with far too little says what the minimum is, as measured on this machine; it is taken where a
run with it does. Each run has a cosine decay, which ends with the time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from configs.base import parse_duration_s
from launch.demo.table import CONFIG
from launch.exits import EXIT_MISTAKE
from launch.output_file import output_file
from pipeline.control.budget import show_duration
from pipeline.evaluate.significance import measure_accuracy
from pipeline.run.run_folder import RunFolder

SEEDS = (0, 1, 2)
FACTORS = (1, 2, 4)
_TOO_LITTLE_S = 40
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
        budget_s: what it was given.
        seed: its seed.
        summary: its `summary.json`.
        answers: whether the answer to a prompt of the test split was right at the end, by prompt.
        process_s: from start to exit of the process.
    """

    budget_s: int
    seed: int
    summary: dict[str, Any]
    answers: dict[int, bool]
    process_s: float

    def __str__(self) -> str:
        """A Markdown row."""
        found, best = self.summary["eval"], self.summary["best"]
        in_time = "yes" if self.process_s <= self.budget_s else "no"
        return (
            f"| {show_duration(self.budget_s)} | {self.seed} | {self.summary['steps']} "
            f"| {show_duration(self.process_s)} | {in_time} "
            f"| {100 * found['before']['accuracy']:.1f}% "
            f"| {100 * sum(self.answers.values()) / len(self.answers):.1f}% | {best['step']} |"
        )


def train(name: str, *, folder: Path, settings: Sequence[str]) -> int:
    """Runs the demo with these settings; returns the exit status."""
    command = [sys.executable, "-m", "launch.train", CONFIG, "--run.name", name]
    command += ["--run.dir", str(folder), *_SETTINGS, *settings]
    return subprocess.run(command, check=False).returncode


def find_minimum_s(*, folder: Path, stamp: str) -> int:
    """The smallest budget that does: what is refused names what would do, until nothing is.

    Raises:
        RuntimeError: if a run fails in another way.
    """
    budget_s = _TOO_LITTLE_S
    while True:
        name = f"deadline-minimum-{show_duration(budget_s)}-{stamp}"
        settings = ["--budget.time", show_duration(budget_s)]
        status = train(name, folder=folder, settings=settings)
        if status == 0:
            return budget_s
        refused = list(RunFolder(folder / name).events("refused"))
        if status != EXIT_MISTAKE or not refused:
            raise RuntimeError(f"{name}: exit status {status}")
        budget_s = ceil(refused[-1]["minimum_s"])


def run(budget_s: int, *, seed: int, folder: Path, stamp: str) -> Row:
    """Runs the demo with a budget of time.

    Raises:
        RuntimeError: if the run fails.
    """
    name = f"deadline-{show_duration(budget_s)}-seed{seed}-{stamp}"
    settings = ["--budget.time", show_duration(budget_s), "--run.seed", str(seed)]
    started = time.monotonic()
    status = train(name, folder=folder, settings=settings)
    process_s = time.monotonic() - started
    if status != 0:
        raise RuntimeError(f"{name}: exit status {status}")
    run_folder = RunFolder(folder / name)
    assert run_folder.summary is not None
    tests = [entry for entry in run_folder.events("evaluated") if entry["name"] == "test_after"]
    if not tests:
        raise RuntimeError(f"{name}: there was no time to evaluate what was exported")
    rows = run_folder.read_answers(tests[-1])
    answers = {row["prompt_id"]: bool(row["correct"]) for row in rows}
    return Row(budget_s, seed, run_folder.summary, answers, process_s)


def mean_line(rows: Sequence[Row]) -> str:
    """The mean over the seeds of one budget, on the prompts that all of them have answered.

    Its interval counts the answers to one prompt as `measure_accuracy` does those of one policy.
    """
    prompts = set.intersection(*(set(row.answers) for row in rows))
    answers = [[row.answers[prompt] for row in rows] for prompt in sorted(prompts)]
    found = measure_accuracy(np.array(answers))
    low, high = (100 * bound for bound in found.ci95)
    budget = show_duration(rows[0].budget_s)
    return f"{budget}: mean accuracy {100 * found.accuracy:.1f}% [{low:.1f}, {high:.1f}]"


def _duration_s(text: str) -> int:
    try:
        return parse_duration_s(text)
    except ValueError as mistake:
        raise argparse.ArgumentTypeError(str(mistake)) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.deadline_table",
        description="Run the demo with the smallest budget of time, twice and four times that.",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="default: 0 1 2")
    parser.add_argument(
        "--minimum", type=_duration_s, help="the smallest budget; default: found by a run"
    )
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="of the run folders")
    parser.add_argument("--json", metavar="FILE", help="also write the summaries to this file")
    options = parser.parse_args(argv)
    try:
        json_file = None if options.json is None else output_file("--json", options.json)
    except ValueError as mistake:
        parser.error(str(mistake))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    minimum_s = options.minimum
    if minimum_s is None:
        minimum_s = find_minimum_s(folder=options.dir, stamp=stamp)
    table = [
        [
            run(factor * minimum_s, seed=seed, folder=options.dir, stamp=stamp)
            for seed in options.seeds
        ]
        for factor in FACTORS
    ]
    print(HEADER)
    for rows in table:
        for row in rows:
            print(row)
    for rows in table:
        print(mean_line(rows))
    if json_file is not None:
        found = [{"seed": row.seed, **row.summary} for rows in table for row in rows]
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
