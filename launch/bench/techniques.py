"""`python -m launch.bench techniques`: what each technique of the pipeline is worth.

A step begins with none of them, and they are switched on one after the other. Its programs are
measured with random weights, or compiled; the number of their runs follows from drawn lengths.
"""

from __future__ import annotations

import argparse
import heapq
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from configs.load import load_config
from launch.bench.harness import CPU_ONLY, Benchmark, Figures, Row, Section, in_child
from launch.bench.launched import trained
from launch.bench.rates import Runs
from launch.bench.shapes import (
    COMPILER,
    SMALLEST,
    config_of,
    expected_on,
    out_of_memory,
    peak_gib,
    random_model,
    sampler,
    study_row,
)
from launch.bench.small_gemma import GROUP, SPREAD, VOCABULARY, prefilled
from launch.bench.v5e import figures, v5e_config
from pipeline.compute.device_memory import array_bytes
from pipeline.compute.learner.learner import Learner
from pipeline.data.batching import Packing
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.hardware import TOPOLOGIES
from pipeline.plan.cost_model.memory import memory_beside
from pipeline.plan.lengths import Lengths
from pipeline.run.cache_folder import CACHE_VARIABLE

TECHNIQUES: Mapping[str, Mapping[str, Any]] = {
    "none": {
        "learner__share_prefix": "false",
        "plan__remat": "none",
        "plan__attention": "blocked",
    },
    "a prefill for each group": {"group_prefill": True},
    "slot refill": {"refill": True},
    "ring caches": {"rings": True},
    "shared prompts in the gradient": {"learner__share_prefix": "true"},
    "flash attention": {"plan__attention": "splash"},
    "rematerialization": {"plan__remat": "full"},
    "host offload": {"plan__remat": "offload"},
    "int8 base": {"model__quantization": "int8"},
    "int8 caches": {"plan__kv_cache": "int8", "learner__importance_cap": 2.0},
    "sampling ahead, on a second device": {"ahead": True},
}
"""Settings that each adds to those before it, and, without `__`, other properties of a step."""
_OF_SAMPLER = ("rings", "model__quantization", "plan__kv_cache")
_OF_LEARNER = (
    "learner__share_prefix",
    "plan__attention",
    "plan__remat",
    "model__quantization",
)
"""What the programs of sampler and learner depend on."""
Point = tuple[str, float, float, float, float, float]
"""The last technique; seconds of sampling, of the update and of the step; GiB of sampler and
learner."""
_ON_TPU = ("flash attention", "host offload")
MODEL = "gemma3-1b"
ROLLOUTS, SLOTS, PROMPT, NEW = 256, 64, 256, 768
QUICK_ROLLOUTS, QUICK_SLOTS, QUICK_PROMPT, QUICK_NEW = 64, 16, 32, 64
SEEDS, STEPS = (0, 1, 2), 40


def steps(
    *,
    model: str,
    device: str,
    techniques: Sequence[str],
    rollouts: int,
    slots: int,
    prompt: int,
    new: int,
) -> Figures:
    """A step with more and more techniques; each program is measured once.

    Args:
        model: a key of `SHAPES`.
        device: as in `config_of`.
        techniques: their names, in the order in which they are added.
        rollouts: of the step, with lognormal lengths.
        slots: of the sampler.
        prompt: tokens of each prompt.
        new: tokens of a completion, at most.

    Returns:
        Seconds with the first and with all, and a point for each; see `Point`.
    """
    lengths = np.random.default_rng(0).lognormal(math.log(new / 3), SPREAD, rollouts)
    lengths = np.clip(lengths.round(), 1, new)
    row, chosen, points = 2 * (prompt + new), dict[str, Any](), list[Point]()
    known: dict[str, Figures] = {}
    case: dict[str, Any] = {
        "model": model,
        "device": device,
        "slots": slots,
        "prompt": prompt,
        "new": new,
        "plan__row_tokens": row,
        "plan__micro_batch_tokens": row,
    }
    for technique in techniques:
        chosen |= TECHNIQUES[technique]
        case |= {key: value for key, value in chosen.items() if "__" in key}
        key = str([chosen.get(name) for name in _OF_SAMPLER])
        if key not in known:
            asked = {"case": case, "rings": "rings" in chosen}
            known[key] = in_child(sampling, asked, environment={})
        sampler_costs, key = known[key], str([chosen.get(name) for name in _OF_LEARNER])
        if key not in known:
            known[key] = in_child(learning, {"case": case}, environment={})
        learner_costs = known[key]
        prompts = rollouts // GROUP if "group_prefill" in chosen else rollouts
        sampling_s = math.ceil(prompts / prefilled(slots)) * sampler_costs["prefill_s"]
        decode_steps = _decode_steps(lengths, slots, refill="refill" in chosen)
        sampling_s += decode_steps * sampler_costs["step_s"]
        packing = Packing.expected(config_of(**case), Lengths(prompt, float(lengths.mean())))
        update_s = rollouts * packing.positions / row * learner_costs["micro_batch_s"]
        both = (sampling_s, update_s)
        step_s = max(both) if "ahead" in chosen else sum(both)
        memory = sampler_costs["gib"], learner_costs["gib"]
        points.append((technique, sampling_s, update_s, step_s, *memory))
    return {
        "how": f"simulated, programs {sampler_costs['how']}",
        "none_s": points[0][3],
        "all_s": points[-1][3],
        "points": points,
    }


def sampling(*, case: Mapping[str, Any], rings: bool) -> Figures:
    """Seconds of a prefill and of a decode step, and GiB of the sampler.

    Args:
        case: arguments of `config_of`.
        rings: see `sampler`.
    """
    costs = sampler(case["model"], config_of(**case), device=case["device"], rings=rings)
    return {"prefill_s": costs.prefill_s, "step_s": costs.step_s, "gib": costs.gib}


def learning(*, case: Mapping[str, Any]) -> Figures:
    """Seconds of the gradient of a micro-batch of one row, and GiB of the learner.

    Args:
        case: arguments of `config_of`.
    """
    config = config_of(**case)
    if case["device"] == COMPILER:
        moments = memory_beside(config, shape_of(config), "gradient 1")["optimizer"]
        found = figures(config, "gradient 1", beside=moments)
        if not found["fits"]:
            raise MemoryError(f"the gradient needs {found['gib']:.1f} GiB")
        return {"micro_batch_s": found["ms"] / 1e3, "gib": found["gib"]}
    with out_of_memory():
        policy, base, adapter = random_model(case["model"], config)
        learner = Learner(policy, base, config, VOCABULARY)
        needed = array_bytes((base, adapter)) + learner.needs["gradient 1"]
        needed += 2 * array_bytes(adapter)  # Adam's moments
        return {"micro_batch_s": learner.micro_batch_s(), "gib": peak_gib(needed)}


def _decode_steps(lengths: np.ndarray, slots: int, *, refill: bool) -> float:
    """Decode steps until all completions have ended, a free slot being filled at once or not."""
    if not refill:
        return sum(max(lengths[first : first + slots]) for first in range(0, len(lengths), slots))
    ends = [0.0] * slots
    for length in lengths:
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)


def started() -> Figures:
    """Seconds of the demo from the command to the end of its first step, by its cache."""
    settings = {"budget.steps": 1, "data.test.limit": 20}
    found = {}
    with tempfile.TemporaryDirectory(prefix="bench-cache") as cache:
        for name in ("empty", "filled"):
            environment = {CACHE_VARIABLE: cache}
            with trained("configs/demo.toml", settings, environment=environment) as run:
                found[f"{name}_s"] = run.metrics[0]["time/elapsed_s"]
    return found


def converged(*, quantization: str, seeds: Sequence[int], steps: int) -> Figures:
    """The demo with a base in this format: accuracy of rollouts by step, and of validation."""
    config = load_config("configs/demo.toml", [("model.quantization", quantization)])
    opened = Runs(config)
    runs = [opened.run(lr=config.learner.lr, seed=seed, steps=steps) for seed in seeds]
    return {
        **{
            f"seed_{run['seed']}": f"{run['before']['greedy']:.3f} -> {run['after']['greedy']:.3f}"
            for run in runs
        },
        "after": float(np.mean([run["after"]["greedy"] for run in runs])),
        "rollouts": [[one["accuracy"] for one in run["steps"]] for run in runs],
    }


def overlapped() -> Figures:
    """The gradient of gemma3-4b with its base sharded over eight chips, and whole on each.

    Both are compiled; the difference is the exchange that computation does not hide.
    """
    whole, sharded = (
        v5e_config("gemma3_4b", slots=16 * chips, prompt=256, new=768, devices=chips, **fsdp)
        for chips, fsdp in ((1, {"plan__fsdp": 1}), (8, {"plan__fsdp": 8}))
    )
    seconds = {
        name: figures(config, f"gradient {config.plan.learner_shards}")["ms"] / 1e3
        for name, config in (("whole", whole), ("sharded", sharded))
    }
    shape = shape_of(sharded)
    # Each layer's weights arrive for the forward pass, its repetition and the backward pass.
    gathered = 3 * 7 / 8 * shape.base_bytes(sharded.model.dtype, quantization="none")
    exchange_s = gathered / TOPOLOGIES["v5e-8"].chip.link_bytes_per_s
    exposed_s = seconds["sharded"] - seconds["whole"]
    return {
        **{f"{name}_s": value for name, value in seconds.items()},
        "exchange_s": exchange_s,
        "exposed_s": exposed_s,
        "hidden_share": 1 - exposed_s / exchange_s,
    }


def words(found: Mapping[str, Figures]) -> Iterator[str]:
    """What each technique changes."""
    for model, row in found.items():
        for before, now in pairwise(row.get("points", ())):
            seconds, sampled, learned = (now[n] - before[n] for n in (3, 4, 5))
            yield (
                f"{model}, {now[0]}: {seconds:+.3g} s of a step ({seconds / before[3]:+.0%}), "
                f"sampler {sampled:+.3g} GiB, learner {learned:+.3g} GiB"
            )


def draw(found: Mapping[str, Figures]) -> Figure:
    """Waterfall of a step's seconds, and the memory with each technique added."""
    (row,) = found.values()
    points = row.get("points", ())
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places, before = np.arange(len(points)), 0.0
    for place, (*_, now, _, _) in zip(places, points, strict=True):
        colour = "tab:gray" if not place else "tab:green" if now <= before else "tab:red"
        left.barh(place, now - before, left=before, color=colour)
        left.text(max(now, before), place, f" {now:.3g}", va="center", fontsize="small")
        before = now
    for side, column, shift in (("sampler", 4, -0.2), ("learner", 5, 0.2)):
        right.barh(places + shift, [point[column] for point in points], 0.4, label=side)
    left.set_yticks(places, [f"{'+ ' if place else ''}{points[place][0]}" for place in places])
    left.invert_yaxis()
    left.set_xlabel("seconds of a step")
    left.set_xlim(0, 1.12 * max((point[3] for point in points), default=1.0))
    right.set_xlabel("GiB of the device")
    right.set_xlim(0, 1.25 * max((max(point[4:]) for point in points), default=1.0))
    right.legend(loc="upper right")
    return figure


def draw_convergence(found: Mapping[str, Figures]) -> Figure:
    """Accuracy of the rollouts by step: mean and range of the seeds."""
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    pane = figure.subplots()
    for name, row in found.items():
        curves = np.array(row.get("rollouts", ()))
        if len(curves):
            steps = np.arange(1, curves.shape[1] + 1)
            pane.plot(steps, curves.mean(axis=0), label=name)
            pane.fill_between(steps, curves.min(axis=0), curves.max(axis=0), alpha=0.2)
    pane.set(xlabel="step", ylabel="accuracy of the rollouts")
    pane.grid(alpha=0.3)
    pane.legend()
    return figure


def benchmark(request: argparse.Namespace) -> Benchmark:
    """The waterfall; by the compiler also the exchange, else the start and the convergence."""
    quick, compiled = request.quick, request.device == COMPILER
    sizes = (
        (QUICK_ROLLOUTS, QUICK_SLOTS, QUICK_PROMPT, QUICK_NEW)
        if quick
        else (ROLLOUTS, SLOTS, PROMPT, NEW)
    )
    given = dict(zip(("rollouts", "slots", "prompt", "new"), sizes, strict=True))
    names = [name for name in TECHNIQUES if compiled or name not in _ON_TPU]
    row = study_row(
        request,
        SMALLEST if quick else MODEL,
        "",
        steps,
        {**given, "techniques": names},
        sizes=10,
        programs=14,
    )
    title = (
        "Seconds of a step without techniques and with all: {rollouts} rollouts of {prompt} tokens "
        "and lognormal completions of at most {new}, {slots} slots, a row of the longest two a "
        "micro-batch"
    )
    sections = [Section("step", title.format(**given), [row], words=words, draw=draw)]
    if compiled:
        title = (
            "The gradient of gemma3-4b, one sequence of 1,024 tokens a chip: base sharded over "
            "eight chips or whole; the exchange at the links' speed, and what of it is not hidden"
        )
        sections.append(Section("overlap", title, [Row("gemma3-4b", overlapped, programs=2)]))
    elif not quick:
        title = "Seconds of the demo from the command to the end of its first step, by its cache"
        start = Row("demo", started, seconds=75)
        sections.append(Section("start", title, [start], environment=CPU_ONLY))
        title = (
            f"The demo with its base in another format, {STEPS} steps: greedy accuracy on the "
            "validation split before and after, by seed"
        )
        sections.append(
            Section(
                "convergence",
                title,
                [
                    Row(
                        name,
                        converged,
                        {"quantization": quantization, "seeds": SEEDS, "steps": STEPS},
                        seconds=300,
                    )
                    for name, quantization in (("float32", "none"), ("int8", "int8"))
                ],
                draw=draw_convergence,
            )
        )
    return Benchmark(sections, expected_on=expected_on(request))
