"""Figures of a program from the TPU compiler: memory, estimated time, invariant 3."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from launch.bench.whole_logits import whole_logits
from pipeline.compute.aot.compile import DoesNotFitError, Program
from pipeline.compute.aot.estimated_time import estimated_seconds
from pipeline.compute.aot.hlo import parse
from pipeline.contracts.topology import GIB, HBM_GIB


def figures(
    program: Callable[[], Program],
    *,
    tokens: int,
    vocab: int,
    model: Sequence[int],
    optimizer_bytes: int = 0,
) -> dict[str, Any]:
    """Compiles a program and returns its memory and estimated time on each chip.

    Args:
        program: compiles the program.
        tokens: positions on each chip.
        vocab: size of the vocabulary.
        model: the model's widths, to distinguish its arrays from logits.
        optimizer_bytes: optimizer state that is on the chip but no argument of the program.

    Returns:
        `fits`. If False, `needs_gib` by the compiler (None if it names no size). If True, GiB of
        arguments, of temporaries (with results that alias no argument), of optimizer state, in
        total and of host memory; estimated milliseconds and microseconds a token; the buffers that
        violate invariant 3.
    """
    began = time.monotonic()
    try:
        compiled = program()
    except DoesNotFitError as error:
        return {"fits": False, "needs_gib": error.needs_gib}
    module = parse(compiled.text)
    arguments, device = compiled.stats.argument_size_in_bytes, compiled.hbm_bytes
    host = compiled.stats.host_argument_size_in_bytes + compiled.stats.host_temp_size_in_bytes
    seconds = estimated_seconds(module)
    large = whole_logits(module, vocab=vocab, model=model)
    return {
        "fits": device + optimizer_bytes <= HBM_GIB * GIB,
        "needs_gib": (device + optimizer_bytes) / GIB,
        "arguments_gib": arguments / GIB,
        "temporary_gib": (device - arguments) / GIB,
        "temporary_mib": (device - arguments - compiled.stats.output_size_in_bytes) / 2**20,
        "optimizer_gib": optimizer_bytes / GIB,
        "total_gib": (device + optimizer_bytes) / GIB,
        "host_gib": host / GIB,
        "estimated_ms": 1e3 * seconds,
        "us_per_token": 1e6 * seconds / tokens,
        "invariant_3": not large,
        "large_buffers": sorted({f"{b.shape.dtype}{list(b.shape.dims)}" for b in large}),
        "compile_s": time.monotonic() - began,
    }
