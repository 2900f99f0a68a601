"""What programs cost: measured with random weights, or compiled for a v5e without a TPU.

Programs of a run are compiled as `launch.plan --verify` compiles them, and their reports are kept
as there; those of peers, and single parts of ours, are compiled in this process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import psutil

from configs.schema import Config
from launch.bench.harness import Figures, Row, compilations, progress
from launch.bench.shapes import COMPILER, SHAPES, SMALLEST, VOCABULARY, Model, random_model
from pipeline.compute.aot.compile import DoesNotFitError, compile_for
from pipeline.compute.decode.engine import Engine
from pipeline.compute.decode.rollout_weights import RolloutWeights, rollout_policy
from pipeline.compute.device_memory import array_bytes, is_out_of_memory
from pipeline.data.models.find_shape import shape_of
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.compiler import compile_programs
from pipeline.plan.topology import GIB, HBM_GIB

POINT_S = {SMALLEST: 5, "gemma3-270m": 30, "gemma3-1b": 40, "gemma2-2b": 60}
"""Seconds of one measured size of a program, mostly of compilation: estimated for an H100; of the
smallest model on two cores."""
_HOST_ROOM = 0.7
"""Share of the host's free memory that a program on CPU devices may take."""


class Sampler(NamedTuple):
    """What a sampler costs with all slots busy.

    Seconds of a decode step, and of a prefill with the filling of slots; memory of the device;
    compilations while compiled programs ran.
    """

    step_s: float
    prefill_s: float
    gib: float
    compilations: int


def samplers(
    model: str,
    configs: Sequence[Config],
    *,
    device: str,
    adapter: bool = True,
    parts: Collection[str] = ("segment", "prefill"),
    rings: bool = True,
) -> Iterator[Sampler]:
    """What samplers cost, one for each configuration, until one does not fit.

    The configurations are those of `shapes.config_of` for this model and device, and differ in
    sizes only. When measured, `adapter` says whether they decode with a LoRA; when compiled, only
    `parts` are, and the others take 0 seconds. Without `rings` caches of sliding layers hold all
    positions.
    """
    with until_full():
        if device == COMPILER:
            for config in configs:
                shape = shape_of(config)
                shape = shape if rings else replace(shape, window=config.rollout.max_tokens)
                yield _compiled(config, shape, parts)
            return
        window = {} if rings else {"sliding_window": configs[0].rollout.max_tokens}
        policy, base, lora = random_model({**SHAPES[model], **window}, configs[0])
        if not adapter:
            policy, lora = policy.without_adapter(), {}
        for config in configs:
            yield _measured((policy, base, lora), config)


def _compiled(config: Config, shape: ModelShape, parts: Collection[str]) -> Sampler:
    (bucket,) = config.prompt_buckets
    names = {"segment": f"segment {config.slots}", "prefill": f"prefill {bucket}"}
    found = {part: figures(config, names[part], shape=shape) for part in parts}
    if not all(one["fits"] for one in found.values()):
        raise MemoryError
    seconds = {part: one["ms"] / 1e3 for part, one in found.items()}
    step_s = seconds.get("segment", 0.0) / config.segment_steps
    gib = max(one["gib"] for one in found.values())
    return Sampler(step_s, seconds.get("prefill", 0.0), gib, compilations=0)


def _measured(model: Model, config: Config) -> Sampler:
    policy, base, lora = model
    engine = Engine(rollout_policy(policy, config), None, config, VOCABULARY)
    weights = RolloutWeights(policy, base, config)
    weights.load(lora)
    with compilations() as compiled:
        times = engine.times(weights.base, weights.adapter)
    needed = array_bytes((weights.base, weights.adapter)) + max(engine.needs.values())
    (prefill_s,) = times.prefill_s.values()
    step_s = times.segment_s[config.slots] / config.segment_steps
    return Sampler(step_s, prefill_s, peak_gib(needed), len(compiled))


@contextmanager
def until_full() -> Iterator[None]:
    """Ends its block where memory runs out."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise


def fits_host(needed: int) -> bool:
    """Whether a CPU's host has room for so many bytes; other devices report a lack themselves."""
    on_cpu = jax.default_backend() == "cpu"
    return not on_cpu or needed <= _HOST_ROOM * psutil.virtual_memory().available


def peak_gib(needed: int) -> float:
    """The device's peak in GiB where it reports one, else the bytes that programs need."""
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return (needed if peak is None else peak) / GIB


def figures(
    config: Config, program: str, *, beside: int = 0, shape: ModelShape | None = None
) -> dict[str, Any]:
    """The compiler's figures of a program of a run, by its name (`pipeline.plan.program_names`).

    Args:
        config: the run.
        program: the name.
        beside: bytes of a chip that are in use while the program runs, without its own.
        shape: of the model, if it is not that of `model.path`.

    Returns:
        `fits`; `gib` in use on a chip, or needed (None if the compiler names no size); estimated
        `ms` of one run, None if it does not fit; `compile_s`.
    """
    found = compile_programs(config, shape or shape_of(config), [program], say=progress)[program]
    gib = None if found.hbm_bytes is None else (found.hbm_bytes + beside) / GIB
    ms = 1e3 * found.seconds if found.fits else None
    fits = found.fits and gib is not None and gib <= HBM_GIB
    return {"fits": fits, "gib": gib, "ms": ms, "compile_s": found.compile_s}


def traced_figures(
    traced: jax.stages.Traced, *, beside: int = 0, trips: float | None = None
) -> dict[str, Any]:
    """`figures` of another program; `trips` are of a loop whose count depends on its arguments."""
    began, ms = time.monotonic(), None
    progress(f"compiling {traced.fun_name} ...")
    try:
        program = compile_for(traced)
        gib: float | None = (program.hbm_bytes + beside) / GIB
        ms = 1e3 * program.seconds(trips=trips)
    except DoesNotFitError as error:
        gib = error.needs_gib
    fits = ms is not None and gib is not None and gib <= HBM_GIB
    return {"fits": fits, "gib": gib, "ms": ms, "compile_s": time.monotonic() - began}


def chosen_models(request: argparse.Namespace) -> Sequence[str]:
    """The models of a study: all, or with `--quick` the small one."""
    return [name for name in SHAPES if (name == SMALLEST) == request.quick]


def study_row(
    request: argparse.Namespace,
    model: str,
    name: str,
    measure: Callable[..., Figures],
    arguments: Mapping[str, Any],
    *,
    sizes: int,
    programs: int | None = None,
) -> Row:
    """A row of a study, of so many measured sizes; `measure` also gets the model and the device.

    `programs` are compiled where the device is the compiler; None: one for each size.
    """
    return Row(
        f"{model}{name}",
        measure,
        {"model": model, "device": request.device, **arguments},
        seconds=POINT_S[model] * sizes,
        programs=sizes if programs is None else programs,
    )
