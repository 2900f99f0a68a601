"""`python -m launch.bench latency`: milliseconds a token against batch, lengths and precision."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from launch.bench.harness import Benchmark, Figures, Row, Section
from launch.bench.shapes import COMPILER, chosen_models, config_of, sampler
from pipeline.plan.topology import TPU_COMPILER

BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16, 64), (1, 8)
LENGTHS, QUICK_LENGTHS = (128, 512, 2048, 4096), (64, 256)
PROMPTS, QUICK_PROMPTS = (10, 50, 100, 250, 500, 1000, 1500), (10, 100)
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
    found, how = {}, ""
    for batch in batches:
        config = config_of(
            model,
            device=device,
            slots=batch,
            prompt=length // 2,
            new=length - length // 2,
            **PRECISIONS[precision],
        )
        try:
            one = sampler(model, config, device=device)
        except ValueError:  # it does not fit
            break
        found[f"{batch}"], how = 1e3 * one.step_s, one.how
    return {"how": how, **found}


def prefill(*, model: str, device: str, prompts: Sequence[int]) -> Figures:
    """Milliseconds of the prefill of one prompt by its length, filling of a slot included."""
    found, how = {}, ""
    for prompt in prompts:
        config = config_of(model, device=device, slots=1, prompt=prompt, new=NEW)
        one = sampler(model, config, device=device)
        found[f"{prompt}"], how = 1e3 * one.prefill_s, one.how
    return {"how": how, **found}


def draw(found: Mapping[str, Figures], *, x: str) -> Figure:
    """Milliseconds against what the columns vary."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    pane = figure.subplots()
    for name, row in found.items():
        points = np.array([(int(key), value) for key, value in row.items() if key.isdecimal()])
        pane.plot(*points.reshape(-1, 2).T, ".-", label=name)
    pane.set(xlabel=x, ylabel="milliseconds", xscale="log", yscale="log")
    pane.grid(alpha=0.3)
    pane.legend(fontsize="x-small")
    return figure


def benchmark(request: argparse.Namespace) -> Benchmark:
    """A row for each model, precision and length."""
    quick, device = request.quick, request.device
    models = chosen_models(request)
    environment = TPU_COMPILER if device == COMPILER else {}
    lengths, batches = (QUICK_LENGTHS, QUICK_BATCHES) if quick else (LENGTHS, BATCHES)
    steps = [
        Row(
            f"{model}, {length:,} positions, {precision}",
            decode,
            {
                "model": model,
                "device": device,
                "precision": precision,
                "length": length,
                "batches": batches,
            },
        )
        for model in models
        for length in lengths
        for precision in PRECISIONS
    ]
    prompts = QUICK_PROMPTS if quick else PROMPTS
    reads = [
        Row(model, prefill, {"model": model, "device": device, "prompts": prompts})
        for model in models
    ]
    return Benchmark(
        (
            Section(
                "decode",
                "Milliseconds of a decode step by batch, caches half full; what is missing does "
                "not fit",
                steps,
                environment=environment,
                draw=partial(draw, x="batch"),
            ),
            Section(
                "prefill",
                "Milliseconds of one prompt's prefill by its tokens",
                reads,
                environment=environment,
                draw=partial(draw, x="tokens of the prompt"),
            ),
        ),
        needs_compiler=device == COMPILER,
    )
