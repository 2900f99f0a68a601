"""`python -m launch.bench latency`: milliseconds a token against batch, lengths and precision."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from launch.bench.harness import Benchmark, Figures, Section, lines
from launch.bench.shapes import (
    COMPILER,
    chosen_models,
    config_of,
    curve,
    expected_on,
    sampler,
    study_row,
)

BATCHES, COMPILED_BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16, 64), (1, 8, 64), (1, 8)
LENGTHS, QUICK_LENGTHS = (128, 512, 2048, 4096), (256,)
PROMPTS, COMPILED_PROMPTS, QUICK_PROMPTS = (
    (10, 50, 100, 250, 500, 1000, 1500),
    (10, 1500),
    (10, 100),
)
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "as loaded": {},
    "int8 weights": {"plan__rollout_weights": "int8", "learner__importance_cap": 2.0},
    "int8 caches": {"plan__kv_cache": "int8", "learner__importance_cap": 2.0},
}
NEW = 32
"""Tokens of a completion, where the prompt's length varies."""


def decode(
    *, model: str, device: str, precision: str, length: int, batches: Sequence[int]
) -> Figures:
    """Milliseconds of a decode step by batch, at half of `length` positions."""
    costs = curve(
        model,
        PRECISIONS[precision],
        device=device,
        slots=batches,
        prompt=length // 2,
        new=length - length // 2,
        parts=["segment"],
    )
    return {f"{batch}": 1e3 * one.step_s for batch, one in costs}


def prefill(*, model: str, device: str, prompts: Sequence[int]) -> Figures:
    """Milliseconds of the prefill of one prompt by its length, filling of a slot included."""
    found = {}
    for prompt in prompts:
        config = config_of(model, device=device, slots=1, prompt=prompt, new=NEW)
        one = sampler(model, config, device=device, parts=["prefill"])
        found[f"{prompt}"] = 1e3 * one.prefill_s
    return found


def draw(found: Mapping[str, Figures], *, x: str) -> Figure:
    """Milliseconds against what the columns vary."""
    points = {
        name: [(int(key), value) for key, value in row.items() if key.isdecimal()]
        for name, row in found.items()
    }
    return lines(points, x=x, y=["milliseconds"])


def benchmark(request: argparse.Namespace) -> Benchmark:
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
            programs=len(batches),
        )
        for model in chosen_models(request)
        for length in lengths
        for precision in PRECISIONS
        if not compiled
        or (length == 2048 and (model == "gemma3-1b" or precision == "as loaded"))
        or (model, precision) == ("gemma3-1b", "as loaded")
    ]
    reads = [
        study_row(
            request,
            model,
            "",
            prefill,
            {"prompts": prompts},
            sizes=len(prompts),
            programs=len(prompts),
        )
        for model in chosen_models(request)
    ]
    return Benchmark(
        [
            Section(
                "decode",
                "Milliseconds of a decode step by batch, caches half full; what is missing does "
                "not fit",
                rows,
                draw=partial(draw, x="batch"),
            ),
            Section(
                "prefill",
                "Milliseconds of one prompt's prefill by its tokens",
                reads,
                draw=partial(draw, x="tokens of the prompt"),
            ),
        ],
        expected_on=expected_on(request),
    )
