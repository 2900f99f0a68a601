"""What the TPU compiler says of a program: memory per chip, estimated time, invariant 3."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from pipeline.plan.figures import estimated_seconds, whole_logits
from pipeline.plan.hlo import parse

GIB = 2**30

_NEEDED = re.compile(r"Used ([\d.]+)G of|\(([\d.]+)G\) exceeds available HBM")


def v5e_devices(count: int) -> Sequence[jax.Device]:
    """The first chips of a v5e-8 that need not be there."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    return topology.devices[:count]


def compile_for(traced: jax.stages.Traced) -> jax.stages.Compiled:
    """Compiles for a TPU."""
    return traced.lower(lowering_platforms=("tpu",)).compile()


def hlo_text(compiled: jax.stages.Compiled) -> str:
    """The optimised program."""
    text = compiled.as_text()
    assert text is not None
    return text


def figures(
    program: Callable[[], jax.stages.Compiled],
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
        `fits`; if it does not, `needs_gib`: of what it counts, at least of temporaries, by the
        compiler's account (None if it gives none). If it
        does, GiB of arguments, temporaries, the optimizer's state and everything together (outputs
        that are no arguments included), of host memory, estimated milliseconds and microseconds a
        token, and the buffers against invariant 3.
    """
    began = time.monotonic()
    try:
        compiled = program()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "HbmOom" not in str(error):
            raise
        used = _NEEDED.search(str(error))
        return {"fits": False, "needs_gib": float(used[1] or used[2]) if used else None}
    memory = compiled.memory_analysis()
    assert memory is not None
    module = parse(hlo_text(compiled))
    beside = memory.output_size_in_bytes - memory.alias_size_in_bytes
    device = memory.argument_size_in_bytes + memory.temp_size_in_bytes + beside + optimizer_bytes
    host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    seconds = estimated_seconds(module)
    large = whole_logits(module, vocab=vocab, model=model)
    return {
        "fits": True,
        "arguments_gib": memory.argument_size_in_bytes / GIB,
        "temporary_gib": memory.temp_size_in_bytes / GIB,
        "temporary_mib": memory.temp_size_in_bytes / 2**20,
        "optimizer_gib": optimizer_bytes / GIB,
        "total_gib": device / GIB,
        "host_gib": host / GIB,
        "estimated_ms": 1e3 * seconds,
        "us_per_token": 1e6 * seconds / tokens,
        "invariant_3": not large,
        "large_buffers": sorted({f"{b.shape.dtype}{list(b.shape.dims)}" for b in large}),
        "compile_s": time.monotonic() - began,
    }
