"""Figures of a program that the TPU compiler has compiled: memory, time, invariant 3."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.compute.aot.compile import DoesNotFitError, Program
from pipeline.compute.aot.cost_figures import HBM, estimated_seconds, whole_logits
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
    """Compiles a program and reads what it takes of each chip.

    Args:
        program: compiles it.
        tokens: positions of each chip.
        vocab: entries of the vocabulary.
        model: the model's own sizes, by which its arrays are told from logits.
        optimizer_bytes: state that is on the chip while the program runs, but not its argument.

    Returns:
        `fits`; if it does not, `needs_gib` by the compiler's account (None if it gives none). If it
        does, GiB of arguments, temporaries (and results that are no arguments), the optimizer's
        state and everything together, of host memory, estimated milliseconds and microseconds a
        token, and the buffers against invariant 3.
    """
    began = time.monotonic()
    try:
        compiled = program()
    except DoesNotFitError as error:
        return {"fits": False, "needs_gib": error.needs_gib}
    module = parse(compiled.text)
    arguments, device = compiled.stats.argument_size_in_bytes, compiled.bytes_of[HBM]
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
