"""`python -m launch.bench techniques`: what each technique of the pipeline is worth.

A step begins with none of them, and they are switched on one after the other. Its programs are
measured with random weights, or compiled; the number of their runs follows from drawn lengths.
"""

from __future__ import annotations

import argparse
import heapq
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from launch.bench import costs, shapes
from launch.bench.harness import CPU_ONLY, Figures, Found, Row, Section, in_child, lines
from launch.bench.launched import trained
from launch.bench.shapes import COMPILER, config_of
from pipeline.compute.aot.compile import compile_for, trace
from pipeline.compute.aot.estimated_time import program_seconds, works_of
from pipeline.compute.aot.hlo import parse
from pipeline.compute.aot.traffic import COLLECTIVES
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
_OF_LEARNER = ("learner__share_prefix", "plan__attention", "plan__remat", "model__quantization")
"""What the programs of sampler and learner depend on."""
Point = tuple[str, float, float, float, float, float]
"""The last technique; seconds of sampling, of the update and of the step; GiB of sampler and
learner."""
_ON_TPU = ("flash attention", "host offload")
MODEL = "gemma3-1b"
SIZES = {"rollouts": 256, "slots": 64, "prompt": 256, "new": 768}
QUICK = {"rollouts": 64, "slots": 16, "prompt": 32, "new": 64}
SPREAD = 0.8
"""Of a completion's lognormal length: standard deviation of the logarithm; the median is a third of
the longest."""
SEEDS, STEPS = (0, 1, 2), 40
DEMO = "configs/demo.toml"


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
    """Seconds of a step of rollouts with lognormal lengths, with more and more techniques."""
    lengths = np.random.default_rng(0).lognormal(math.log(new / 3), SPREAD, rollouts)
    lengths = np.clip(lengths.round(), 1, new)
    row, chosen, points = 2 * (prompt + new), dict[str, Any](), list[Point]()
    known: dict[str, Figures] = {}
    case: dict[str, Any] = {"model": model, "device": device, "slots": slots, "prompt": prompt}
    case |= {"new": new, "plan__row_tokens": row, "plan__micro_batch_tokens": row}

    def measured(measure: Callable[..., Figures], keys: Sequence[str], **how: Any) -> Figures:
        """Of the programs, each of which is measured once."""
        key = str([measure.__name__, *(chosen.get(name) for name in keys)])
        if key not in known:
            known[key] = in_child(measure, {"case": case, **how}, environment={})
        return known[key]

    for technique in techniques:
        chosen |= TECHNIQUES[technique]
        case |= {key: value for key, value in chosen.items() if "__" in key}
        sampler = measured(sampling, _OF_SAMPLER, rings="rings" in chosen)
        learner = measured(learning, _OF_LEARNER)
        prompts = rollouts // shapes.GROUP if "group_prefill" in chosen else rollouts
        sampling_s = math.ceil(prompts / shapes.prefilled(slots)) * sampler["prefill_s"]
        decode_steps = _decode_steps(lengths, slots, refill="refill" in chosen)
        sampling_s += decode_steps * sampler["step_s"]
        packing = Packing.expected(config_of(**case), Lengths(prompt, float(lengths.mean())))
        update_s = rollouts * packing.positions / row * learner["micro_batch_s"]
        both = (sampling_s, update_s)
        step_s = max(both) if "ahead" in chosen else sum(both)
        points.append((technique, *both, step_s, sampler["gib"], learner["gib"]))
    return {
        "how": f"simulated, programs {sampler['how']}",
        "none_s": points[0][3],
        "all_s": points[-1][3],
        **{f"+ {technique}": step_s for technique, _, _, step_s, _, _ in points[1:]},
        "points": points,
    }


def sampling(*, case: Mapping[str, Any], rings: bool) -> Figures:
    """Seconds of a prefill and of a decode step, and GiB of the sampler."""
    configs = [config_of(**case)]
    one = next(costs.samplers(case["model"], configs, device=case["device"], rings=rings), None)
    if one is None:
        raise MemoryError("the sampler does not fit the device")
    return {"prefill_s": one.prefill_s, "step_s": one.step_s, "gib": one.gib}


def learning(*, case: Mapping[str, Any]) -> Figures:
    """Seconds of the gradient of a micro-batch of one row, and GiB of the learner."""
    config = config_of(**case)
    if case["device"] == COMPILER:
        moments = memory_beside(config, shape_of(config), "gradient 1")["optimizer"]
        found = costs.figures(config, "gradient 1", beside=moments)
        assert found["fits"], found
        return {"micro_batch_s": found["ms"] / 1e3, "gib": found["gib"]}
    policy, base, adapter = shapes.random_model(shapes.SHAPES[case["model"]], config)
    learner = Learner(policy, base, config, shapes.VOCABULARY)
    # Adam has two moments.
    needed = array_bytes((base, adapter)) + learner.needs["gradient 1"] + 2 * array_bytes(adapter)
    return {"micro_batch_s": learner.micro_batch_s(), "gib": costs.peak_gib(needed)}


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
            with trained(DEMO, settings, environment={CACHE_VARIABLE: cache}) as run:
                found[f"{name}_s"] = run.metrics[0]["time/elapsed_s"]
    return found


def converged(*, quantization: str, seeds: Sequence[int], steps: int) -> Figures:
    """The demo with a base in this format: accuracy of rollouts by step, and of validation."""
    found, last, rollouts = dict[str, Any](), list[float](), list[list[float]]()
    for seed in seeds:
        settings = {"run.seed": seed, "budget.steps": steps, "model.quantization": quantization}
        with trained(DEMO, settings, environment={}) as run:
            first, *_, after = [one["accuracy"] for one in run.evaluations("validation")]
            rollouts.append([row["rollout/correct_share"] for row in run.metrics])
        found[f"seed_{seed}"] = f"{first:.3f} -> {after:.3f}"
        last.append(after)
    return {**found, "after": float(np.mean(last)), "rollouts": rollouts}


def overlapped() -> Figures:
    """The gradient of gemma3-4b with its base sharded over eight chips, compiled.

    Returns:
        Seconds of the gradient; `weights_s`, of moving the layers' weights at the links' speed;
        `exposed_s`, of all collectives that stand alone in the schedule, and of waiting for others:
        those that the compiler computes within a product are hidden.
    """
    config = config_of(
        "gemma3-4b",
        device=COMPILER,
        slots=128,
        prompt=256,
        new=768,
        plan__learner_devices=8,
        plan__fsdp=8,
        plan__micro_batch_tokens=8 * 1024,
    )
    shape = shape_of(config)
    traced, trips = trace(config, shape, "gradient 8")
    program = compile_for(traced)
    works = works_of(parse(program.text), program.schedule, trips=trips)
    exposed_s = sum(
        work.runs * work.seconds
        for work in works
        if work.line.opcode.removesuffix("-done") in COLLECTIVES
    )
    # Seven eighths of each layer arrive for the forward pass, and again for the backward pass.
    layer = shape.layer_bytes(0, config.model.dtype, tp=1)
    gathered = 2 * 7 / 8 * shape.layers * layer
    return {
        "gradient_s": program_seconds(works),
        "weights_s": gathered / TOPOLOGIES["v5e-8"].chip.link_bytes_per_s,
        "exposed_s": exposed_s,
    }


def draw(found: Found) -> Figure:
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
    right.set_xlabel("GiB of the device")
    left.set_xlim(0, 1.12 * max((point[3] for point in points), default=1.0))
    right.margins(x=0.25)
    right.legend(loc="upper right")
    return figure


def draw_convergence(found: Found) -> Figure:
    """Accuracy of the rollouts by step; a line is a seed."""
    points = {
        f"{name}, {seed}": list(enumerate(curve, 1))
        for name, row in found.items()
        for seed, curve in enumerate(row.get("rollouts", ()))
    }
    columns = ("step", "accuracy of the rollouts")
    return lines(points, columns, [(0, 1)], scale="linear", group=lambda name: name.split(",")[0])


def sections(request: argparse.Namespace) -> list[Section]:
    """The waterfall; by the compiler also the exchange, else the start and the convergence."""
    quick, compiled = request.quick, request.device == COMPILER
    given = QUICK if quick else SIZES
    names = [name for name in TECHNIQUES if compiled or name not in _ON_TPU]
    model, arguments = shapes.SMALLEST if quick else MODEL, {**given, "techniques": names}
    row = costs.study_row(request, model, "", steps, arguments, sizes=10, programs=14)
    title = (
        "Seconds of a step without techniques and with all: {rollouts} rollouts of {prompt} tokens "
        "and lognormal completions of at most {new}, {slots} slots, a row of the longest two a "
        "micro-batch"
    )
    found = [Section("step", title.format(**given), [row], draw=draw)]
    if compiled:
        title = (
            "The gradient of gemma3-4b, one sequence of 1,024 tokens a chip, its base sharded over "
            "eight chips: seconds of the layers' weights on the links, and of exposed collectives"
        )
        found.append(Section("overlap", title, [Row("gemma3-4b", overlapped, programs=1)]))
    elif not quick:
        title = "Seconds of the demo from the command to the end of its first step, by its cache"
        start = Row("demo", started, seconds=75)
        found.append(Section("start", title, [start], environment=CPU_ONLY))
        title = (
            f"Runs of {STEPS} steps of the demo with its base in another format: greedy accuracy "
            "on the validation split before and after, by seed"
        )
        runs = {"seeds": SEEDS, "steps": STEPS}
        rows = [
            Row(name, converged, {"quantization": kind, **runs}, seconds=400)
            for name, kind in (("float32", "none"), ("int8", "int8"))
        ]
        found.append(
            Section("convergence", title, rows, environment=CPU_ONLY, draw=draw_convergence)
        )
    return found
