"""`python -m launch.bench race`: this pipeline and Tunix's `GRPOLearner` on the same task and time.

Both have the same model, rows, reward functions, group size, rank, seeds, processor and seconds.
Ours is `launch.train`, as a user starts it: its seconds include Ray, compilation, the evaluations
and an export. Tunix's seconds (`launch.bench.tunix_grpo`) end with its last step; its versions are
evaluated afterwards, greedily on the same rows, in time that does not count. Neither side has
compiled programs of an earlier run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from safetensors.numpy import load_file

from configs.load import load_config
from launch.bench.harness import CPU_ONLY, Benchmark, Claim, Figures, Row, Section, in_child
from launch.bench.launched import trained
from launch.bench.rates import Runs
from launch.peak_memory import PeakMemory
from pipeline.run.cache_folder import CACHE_VARIABLE

OURS, TUNIX = "ours", "Tunix"
THIRD = 3.0
"""Tunix's final accuracy is wanted in its seconds divided by this."""


def ours(*, config: str, seed: int, lr: float, seconds: float, every: int) -> Figures:
    """A run of this pipeline with a time budget; see `_figures`."""
    settings = {
        "run.seed": seed,
        "learner.lr": lr,
        "budget.steps": "none",
        "budget.time": f"{seconds:.0f}s",
        "eval.every_steps": every,
    }
    with (
        tempfile.TemporaryDirectory(prefix="race") as cache,
        PeakMemory() as peak,
        trained(config, settings, environment={CACHE_VARIABLE: cache}) as run,
    ):
        elapsed = [row["time/elapsed_s"] for row in run.metrics]
        rollout = load_config(config).rollout
        rollouts = rollout.prompts_per_step * rollout.group_size
        tokens = np.cumsum([rollouts * row["rollout/tokens_mean"] for row in run.metrics]).tolist()
        validated = {one["step"]: one["accuracy"] for one in run.evaluations("validation")}
        (before,) = run.evaluations("test_before")
        test = before["accuracy"], run.summary["eval"]["after"]["accuracy"]
    return _figures(validated, elapsed, tokens, test=test, peak_bytes=peak.bytes)


def tunix(*, config: str, seed: int, lr: float, seconds: float, every: int) -> Figures:
    """A run of Tunix; see `_figures`."""
    from launch.bench import tunix_grpo

    with tempfile.TemporaryDirectory(prefix="race") as folder:
        task = {"config": config, "seed": seed, "lr": lr, "seconds": seconds, "every": every}
        with PeakMemory() as peak:
            found = in_child(tunix_grpo.train, {**task, "folder": folder}, environment={})
        validated, test = evaluated(config, Path(folder))
    return _figures(
        validated, found["elapsed_s"], found["tokens"], test=test, peak_bytes=peak.bytes
    )


def evaluated(config: str, folder: Path) -> tuple[dict[int, float], tuple[float, float]]:
    """Greedy accuracies of the versions in a folder.

    Returns:
        On the validation split, by step; on the test split, of the first version and of the best
        by validation.
    """
    opened = Runs(load_config(config))
    validation, test = opened.data.validation, opened.data.test
    assert validation is not None
    assert test is not None

    def accuracy(step: int, prompts: Sequence[Any]) -> float:
        adapter = opened.policy.place_adapter(load_file(folder / f"{step}.safetensors"))
        return float(opened.measure(prompts, adapter, samples=1).correct.mean())

    steps = sorted(int(path.stem) for path in folder.glob("*.safetensors"))
    validated = {step: accuracy(step, validation.prompts) for step in steps}
    best = max(steps, key=lambda step: (validated[step], -step))
    return validated, (accuracy(steps[0], test.prompts), accuracy(best, test.prompts))


def _figures(
    validated: Mapping[int, float],
    elapsed: Sequence[float],
    tokens: Sequence[float],
    *,
    test: tuple[float, float],
    peak_bytes: int,
) -> dict[str, Any]:
    """The figures of a run.

    Args:
        validated: accuracy on the validation split by step.
        elapsed: seconds from the command to the end of each step.
        tokens: generated until then.
        test: accuracy on the test split, of the base and of the best version by validation.
        peak_bytes: of the run's processes.
    """
    if not elapsed:
        raise ValueError("no step was done in this time; give more --minutes")
    points = [
        [elapsed[step - 1] if step else 0.0, tokens[step - 1] if step else 0.0, step, accuracy]
        for step, accuracy in sorted(validated.items())
    ]
    return {
        "steps": len(elapsed),
        "first_step_s": elapsed[0],
        "step_s": float(np.median(np.diff([0.0, *elapsed]))),
        "tokens_generated": int(tokens[-1]),
        "test_before": test[0],
        "test_after": test[1],
        "peak_gib": peak_bytes / 2**30,
        "points": points,
    }


def draw(found: Mapping[str, Figures]) -> Figure:
    """Accuracy on the validation split against seconds, generated tokens and steps.

    A line is a run; the best learning rate of each side is drawn.
    """
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panes = figure.subplots(1, 3, sharey=True)
    for side, colour in ((OURS, "tab:blue"), (TUNIX, "tab:orange")):
        for number, run in enumerate(_best_runs(found, side).values()):
            label = side if number == 0 else None
            points = np.array(run["points"])
            for pane, column in zip(panes, range(3), strict=True):
                pane.plot(
                    points[:, column], points[:, 3], ".-", color=colour, alpha=0.8, label=label
                )
    for pane, name in zip(panes, ("seconds", "generated tokens", "steps"), strict=True):
        pane.set_xlabel(name)
        pane.grid(alpha=0.3)
    panes[0].set_ylabel("accuracy on the validation split")
    panes[0].legend()
    return figure


def _best_runs(found: Mapping[str, Figures], side: str) -> dict[str, Figures]:
    """The runs of a side with the learning rate whose last accuracies are best, by seed."""
    by_rate: dict[str, dict[str, Figures]] = {}
    for name, figures in found.items():
        whose, rate, seed = name.split(", ")
        if whose == side and "points" in figures:
            by_rate.setdefault(rate, {})[seed] = figures

    def last(runs: Mapping[str, Figures]) -> float:
        return float(np.mean([run["points"][-1][3] for run in runs.values()]))

    return max(by_rate.values(), key=last, default={})


def _claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    us, them = _best_runs(found, OURS), _best_runs(found, TUNIX)
    for seed in (one for one in us if one in them):
        we, they = us[seed], them[seed]
        final = they["points"][-1]
        reached = [point[0] for point in we["points"] if point[3] >= final[3]]
        in_time = bool(reached) and reached[0] <= final[0] / THIRD
        when = f"after {reached[0]:.0f} s" if reached else "never"
        yield Claim(
            f"{seed}: Tunix's last validation accuracy, {final[3]:.1%} after {final[0]:.0f} s, "
            f"is reached {when} (in a third of its seconds)",
            in_time,
        )
        ends = we["test_after"], they["test_after"]
        yield Claim(
            f"{seed}: at equal seconds the test accuracy is {ends[0]:.1%} against "
            f"{ends[1]:.1%} (higher)",
            ends[0] > ends[1],
        )
        step = min(we["points"][-1][2], final[2])
        at = [max(p[3] for p in run["points"] if p[2] <= step) for run in (we, they)]
        yield Claim(
            f"{seed}: within {step} steps, as many samples, the best validation accuracy is "
            f"{at[0]:.1%} against {at[1]:.1%} (not lower)",
            at[0] >= at[1],
        )


def benchmark(request: argparse.Namespace) -> Benchmark:
    """A row for each side, learning rate and seed.

    Raises:
        ValueError: for a mistake in the configuration, or if it lacks a split.
        FileNotFoundError: if there is no such configuration.
    """
    config = load_config(request.config)
    if config.data.validation is None or config.data.test is None:
        raise ValueError("data.validation and data.test are needed: the race is judged on them")
    if config.learner.schedule != "constant" or config.learner.loss != "grpo":
        raise ValueError("the race needs learner.schedule = constant and learner.loss = grpo")
    minutes = request.minutes or (3 if request.quick else 6)
    seeds = request.seeds or ([0] if request.quick else [0, 1, 2])
    given = {"config": request.config, "seconds": 60 * minutes, "every": request.every}
    rows = [
        Row(
            f"{side}, lr {lr:g}, seed {seed}",
            run,
            {**given, "lr": lr, "seed": seed},
            # Tunix's versions are evaluated afterwards.
            seconds=60 * (minutes + (side == TUNIX)),
        )
        for seed in seeds
        for lr in request.lr or [config.learner.lr]
        for side, run in ((OURS, ours), (TUNIX, tunix))
    ]
    title = (
        f"The same task for {minutes:g} minutes: accuracies on the test split, of the base and of "
        "the best version by validation; memory of all processes"
    )
    environment = CPU_ONLY if config.plan.platform == "cpu" else {}
    return Benchmark([Section("race", title, rows, [_claims], environment, draw=draw)])
