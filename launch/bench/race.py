"""`python -m launch.bench race`: this pipeline and Tunix's `GRPOLearner` on the same task and time.

Both have the same model, rows, reward functions, group size, rank, seeds, processor and seconds.
The learning rate is constant after its warm-up. Ours is `launch.train`, as a user starts it: its
seconds include Ray, compilation, the evaluations and an export. Tunix's seconds
(`launch.bench.tunix_grpo`) end with its last step; its versions are evaluated afterwards, greedily
on the same rows, in time that does not count. Neither side has compiled programs of an earlier run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from safetensors.numpy import load_file

from configs.evaluation import EXACT_ANSWER
from configs.load import load_config
from launch.bench.harness import CPU_ONLY, Claim, Figures, Found, Row, Section, in_child
from launch.bench.launched import trained
from launch.peak_memory import PeakMemory
from pipeline.compute.decode.engine import Engine
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.compute.opening import open_policy
from pipeline.compute.program_cache import use_program_cache
from pipeline.data.load import load_data
from pipeline.data.text.prompts import PromptMaker
from pipeline.data.text.tokenizer_files import read_tokenizer
from pipeline.evaluate.evaluation import judge, requests
from pipeline.plan.search.fitting import first_sizes, with_chosen_placement
from pipeline.plan.sizes import sized
from pipeline.run.cache_folder import CACHE_VARIABLE
from pipeline.types import Prompt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, TUNIX = "ours", "Tunix"
THIRD = 3.0
"""Tunix's final accuracy is wanted in its seconds divided by this."""


def raced(*, side: str, config: str, seed: int, lr: float, seconds: float, every: int) -> Figures:
    """A run of one side on the task of a configuration; one version in `every` steps is evaluated.

    Returns:
        A point for each evaluated version: seconds since the command, tokens generated until then,
        step, accuracy on the validation split. Accuracies on the test split are those of the base
        and of the best version by validation.
    """
    run = ours if side == OURS else tunix
    with tempfile.TemporaryDirectory(prefix="race") as folder, PeakMemory() as peak:
        asked = config, seed, lr, seconds, every
        elapsed, tokens, validated, test = run(*asked, folder=Path(folder))
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
        "peak_gib": peak.bytes / 2**30,
        "points": points,
    }


Run = tuple[Sequence[float], Sequence[float], Mapping[int, float], tuple[float, float]]
"""Seconds and tokens until the end of each step, accuracies on the validation split by step, and on
the test split before and after."""


def settings(*, seed: int, lr: float, seconds: float, every: int) -> dict[str, Any]:
    """What a run of this pipeline has instead of the configuration's values."""
    return {
        "run.seed": seed,
        "learner.lr": lr,
        "learner.schedule": "constant",
        "budget.steps": "none",
        "budget.time": f"{seconds:.0f}s",
        "eval.every_steps": every,
    }


def ours(config: str, seed: int, lr: float, seconds: float, every: int, *, folder: Path) -> Run:
    """A run of this pipeline with a time budget; the folder is its empty cache."""
    changed = settings(seed=seed, lr=lr, seconds=seconds, every=every)
    with trained(config, changed, environment={CACHE_VARIABLE: str(folder)}) as run:
        elapsed = [row["time/elapsed_s"] for row in run.metrics]
        rollout = load_config(config).rollout
        rollouts = rollout.prompts_per_step * rollout.group_size
        tokens = np.cumsum([rollouts * row["rollout/tokens_mean"] for row in run.metrics])
        validated = {one["step"]: one["accuracy"] for one in run.evaluations("validation")}
        (before,) = run.evaluations("test_before")
        test = before["accuracy"], run.summary["eval"]["after"]["accuracy"]
    return elapsed, tokens.tolist(), validated, test


def tunix(config: str, seed: int, lr: float, seconds: float, every: int, *, folder: Path) -> Run:
    """A run of Tunix, whose versions in the folder are then evaluated."""
    # Imported late: our side does without Tunix.
    from launch.bench import tunix_grpo

    asked = {"config": config, "seed": seed, "lr": lr, "seconds": seconds, "every": every}
    found = in_child(tunix_grpo.train, {**asked, "folder": str(folder)}, environment={})
    use_program_cache()
    task = with_chosen_placement(load_config(config), None)
    task = sized(task, first_sizes(task, None))
    model, tokenizer = Path(task.model.path), read_tokenizer(Path(task.model.path))
    data, maker = load_data(task, tokenizer), PromptMaker(task.prompt, tokenizer)
    mesh = make_mesh(jax.devices()[:1])
    policy, base = open_policy(model, dtype=task.model.dtype, lora=task.lora, mesh=mesh)
    vocabulary = Vocabulary.of(tokenizer, task.rollout)
    engine = Engine(policy, base, task, vocabulary, text_of=tokenizer.decode)
    assert data.validation is not None
    assert data.test is not None

    def accuracy(step: int, prompts: Sequence[Prompt]) -> float:
        """Of the greedy answers."""
        drawn = engine.generate(
            requests(prompts, phase="validation"),
            adapter=policy.place_adapter(load_file(folder / f"{step}.safetensors")),
            version=0,
            adapter_sha256="",
            temperature=0.0,
        )
        exact = task.with_metric(EXACT_ANSWER)
        return float(judge(prompts, drawn, config=exact, maker=maker).correct.mean())

    steps = sorted(int(path.stem) for path in folder.glob("*.safetensors"))
    validated = {step: accuracy(step, data.validation.prompts) for step in steps}
    best = max(steps, key=lambda step: (validated[step], -step))
    test = accuracy(steps[0], data.test.prompts), accuracy(best, data.test.prompts)
    return found["elapsed_s"], found["tokens"], validated, test


def draw(found: Found) -> Figure:
    """Accuracy on the validation split against seconds, generated tokens and steps.

    Mean and range of the seeds, between the evaluated versions and up to the end of the shortest
    run, with each side's best learning rate.
    """
    # Imported late: the command's help does without matplotlib.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    columns = ("seconds", "generated tokens, in thousands", "steps")
    for column, (pane, name) in enumerate(zip(figure.subplots(1, 3), columns, strict=True)):
        for side in (OURS, TUNIX):
            runs = [np.array(run["points"]) for run in _best_runs(found, side).values()]
            if not runs:
                continue
            x = np.linspace(0, min(run[-1, column] for run in runs), 200)
            curves = [np.interp(x, run[:, column], run[:, 3]) for run in runs]
            shown = x / 1000 if column == 1 else x
            (line,) = pane.plot(shown, np.mean(curves, axis=0), label=f"{side}, seeds: {len(runs)}")
            low, high = np.min(curves, axis=0), np.max(curves, axis=0)
            pane.fill_between(shown, low, high, alpha=0.2, color=line.get_color())
        pane.set(xlabel=name, ylabel="accuracy on the validation split")
        pane.grid(alpha=0.3)
    if pane.lines:
        pane.legend(loc="lower right")
    return figure


def _best_runs(found: Found, side: str) -> dict[str, Figures]:
    """The runs of a side with the learning rate whose last accuracies are best, by seed."""
    by_rate: dict[str, dict[str, Figures]] = {}
    for name, figures in found.items():
        whose, rate, seed = name.split(", ")
        if whose == side and "points" in figures:
            by_rate.setdefault(rate, {})[seed] = figures

    def last(runs: Mapping[str, Figures]) -> float:
        return float(np.mean([run["points"][-1][3] for run in runs.values()]))

    return max(by_rate.values(), key=last, default={})


def _claims(found: Found) -> Iterator[Claim]:
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


def sections(request: argparse.Namespace) -> list[Section]:
    """A row for each side, learning rate and seed.

    Raises:
        ValueError: for a configuration or numbers that a run of this pipeline refuses.
    """
    config = load_config(request.config)
    if config.data.validation is None or config.data.test is None:
        raise ValueError("data.validation and data.test are needed: the race is judged on them")
    if config.learner.loss != "grpo":
        raise ValueError("the race needs learner.loss = grpo")
    if request.every < 1:
        raise ValueError(f"command line: --every {request.every}: must be at least 1")
    minutes = request.minutes
    if minutes is None:
        minutes = 3 if request.quick else 6
    seeds = request.seeds or ([0] if request.quick else [0, 1, 2])
    given = {"seconds": 60 * minutes, "every": request.every}
    rates = request.lr or [config.learner.lr]
    sides = [(OURS, lr) for lr in rates] + [(TUNIX, lr) for lr in request.tunix_lr or rates]
    for seed, (_, lr) in product(seeds, sides):
        changed = settings(seed=seed, lr=lr, **given)
        load_config(request.config, [(key, str(value)) for key, value in changed.items()])
    rows = [
        Row(
            f"{side}, lr {lr:g}, seed {seed}",
            raced,
            {**given, "config": request.config, "side": side, "lr": lr, "seed": seed},
            # Tunix's versions are evaluated afterwards.
            seconds=60 * (minutes + (side == TUNIX)),
        )
        for seed, (side, lr) in product(seeds, sides)
    ]
    title = (
        f"The same task for {minutes:g} minutes: accuracies on the test split, of the base and of "
        "the best version by validation; memory of all processes"
    )
    environment = CPU_ONLY if config.plan.platform == "cpu" else {}
    return [Section("race", title, rows, [_claims], environment, draw=draw)]
