"""What the TPU compiler says of a program: memory per chip, estimated time, invariant 3."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.experimental import topologies

from pipeline.plan.figures import estimated_seconds, whole_logits
from pipeline.plan.hlo import parse
from pipeline.plan.memory_report import HBM, memory_spaces

GIB = 2**30
HBM_GIB = 15.75
"""What a program may hold of a v5e chip."""

_NEEDED = re.compile(r"Used ([\d.]+)G of|\(([\d.]+)G\) exceeds available HBM")


def v5e_devices(count: int) -> Sequence[jax.Device]:
    """The first chips of a v5e-8 that need not be there."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    return topology.devices[:count]


class DoesNotFitError(Exception):
    """A program that needs more memory than a chip has.

    Attributes:
        needs_gib: by the compiler's account; None: it gives none.
    """

    def __init__(self, message: str) -> None:
        """Reads the compiler's message."""
        super().__init__(message)
        used = _NEEDED.search(message)
        self.needs_gib = float(used[1] or used[2]) if used else None


@dataclass(frozen=True)
class Program:
    """A program compiled for a TPU.

    Attributes:
        text: optimised HLO.
        bytes_of: what it holds of each memory space, arguments included.
        stats: sizes of its arguments and results.
    """

    text: str
    bytes_of: Mapping[str, int]
    stats: Any


def compile_for(traced: jax.stages.Traced) -> Program:
    """Compiles for a TPU and reads the compiler's report on memory.

    Raises:
        DoesNotFitError: if the compiler finds no way to fit the program into a chip.
    """
    lowered = traced.lower(lowering_platforms=("tpu",))
    with TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and "HbmOom" not in str(error):
                raise
            raise DoesNotFitError(str(error)) from None
        (report,) = Path(folder).glob("*memory-usage-report.txt")
        spaces = memory_spaces(report.read_text())
    text = compiled.as_text()
    assert text is not None
    return Program(text, spaces, compiled.memory_analysis())


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
