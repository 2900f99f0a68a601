"""`python -m launch.bench latency`: milliseconds a token against batch, lengths and precision."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from launch.bench.costs import chosen_models, samplers, study_row
from launch.bench.harness import Bound, Figures, Found, Section, lines
from launch.bench.shapes import COMPILER, config_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES, COMPILED_BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16, 32, 64), (1, 32, 64), (1, 8, 16)
LENGTHS, QUICK_LENGTHS = (128, 512, 2048, 4096), (256,)
PROMPTS, COMPILED_PROMPTS, QUICK_PROMPTS = (
    (10, 50, 100, 250, 500, 1000, 1500),
    (10, 1500),
    (10, 100),
)
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "as loaded": {},
    "int8 weights": {"plan__rollout_weights": "int8", "learner__importance_cap": 2.0},
    "int8 products": {"plan__rollout_weights": "int8_matmul", "learner__importance_cap": 2.0},
    "int8 caches": {"plan__kv_cache": "int8", "learner__importance_cap": 2.0},
}
NEW = 32
"""Tokens of a completion, where the prompt's length varies."""


def decode(
    *, model: str, device: str, precision: str, length: int, batches: Sequence[int]
) -> Figures:
    """Milliseconds of a decode step by batch, at half of `length` positions.

    `compilations`: during the timing, after the programs were compiled.
    """
    sizes = {"prompt": length // 2, "new": length - length // 2}
    configs = [
        config_of(model, device=device, slots=batch, **sizes, **PRECISIONS[precision])
        for batch in batches
    ]
    costs = list(samplers(model, configs, device=device, parts=["segment"]))
    found = {f"{n}": 1e3 * one.step_s for n, one in zip(batches, costs, strict=False)}
    counted = {} if device == COMPILER else {"compilations": sum(c.compilations for c in costs)}
    return found | counted


def prefill(*, model: str, device: str, prompts: Sequence[int]) -> Figures:
    """Milliseconds of the prefill of one prompt by its length, filling of a slot included."""
    configs = [config_of(model, device=device, slots=1, prompt=n, new=NEW) for n in prompts]
    costs = samplers(model, configs, device=device, parts=["prefill"])
    return {f"{n}": 1e3 * one.prefill_s for n, one in zip(prompts, costs, strict=False)}


def words(found: Found) -> Iterator[str]:
    """What 8 bits on half of the devices cost: each of them has twice the batch."""
    for name, row in found.items():
        model, positions, precision = name.rsplit(", ", 2)
        if precision not in ("int8 weights", "int8 products"):
            continue
        whole = found.get(f"{model}, {positions}, as loaded", {})
        for batch in map(int, filter(str.isdecimal, whole)):
            if (twice := f"{2 * batch}") in row:
                ratio = row[twice] / whole[f"{batch}"]
                yield (
                    f"{model}, {positions}: with {precision} on half of the devices, {twice} rows "
                    f"on each, a step takes {ratio:.2f} times as long as with weights as loaded on "
                    f"all of them, {batch} rows on each"
                )


def draw(found: Found, *, x: str) -> Figure:
    """Milliseconds against what the columns vary."""
    points = {
        name: [(int(key), value) for key, value in row.items() if key.isdecimal()]
        for name, row in found.items()
    }
    return lines(points, (x, "milliseconds"), [(0, 1)])


def sections(request: argparse.Namespace) -> list[Section]:
    """A row for each model, precision and length.

    Compiled: all lengths of gemma3-1b as loaded, elsewhere one length.
    """
    quick, compiled = request.quick, request.device == COMPILER
    lengths = QUICK_LENGTHS if quick else LENGTHS
    batches = QUICK_BATCHES if quick else COMPILED_BATCHES if compiled else BATCHES
    prompts = QUICK_PROMPTS if quick else COMPILED_PROMPTS if compiled else PROMPTS
    rows = [
        study_row(
            request,
            model,
            f", {length:,} positions, {precision}",
            decode,
            {"precision": precision, "length": length, "batches": batches},
            sizes=len(batches),
        )
        for model in chosen_models(request)
        for length in lengths
        for precision in PRECISIONS
        if not compiled
        or (length == 2048 and (model == "gemma3-1b" or precision == "as loaded"))
        or (model, precision) == ("gemma3-1b", "as loaded")
    ]
    reads = [
        study_row(request, model, "", prefill, {"prompts": prompts}, sizes=len(prompts))
        for model in chosen_models(request)
    ]
    return [
        Section(
            "decode",
            "Milliseconds of a decode step by batch, caches half full; what is missing does not "
            "fit; programs compiled while they were timed",
            rows,
            [] if compiled else [Bound("compilations", most=0)],
            words=words,
            draw=partial(draw, x="batch"),
        ),
        Section(
            "prefill",
            "Milliseconds of one prompt's prefill by its tokens",
            reads,
            draw=partial(draw, x="tokens of the prompt"),
        ),
    ]
