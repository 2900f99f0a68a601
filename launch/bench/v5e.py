"""Memory and estimated time of programs on v5e chips, by the TPU compiler, without a TPU.

Programs of a run are compiled as `launch.plan --verify` compiles them, and their reports are kept
as there; the peer's, and single parts of ours, are compiled in this process.
"""

from __future__ import annotations

import time
from typing import Any

import jax

from configs.schema import Config
from launch.bench.small_gemma import preset
from pipeline.compute.aot.compile import DoesNotFitError, compile_for
from pipeline.compute.aot.estimated_time import program_seconds
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.compiler import compile_programs
from pipeline.plan.search.fitting import first_sizes, with_chosen_placement
from pipeline.plan.sizes import sized
from pipeline.plan.topology import GIB, HBM_GIB

PROMPT = 256
"""Tokens of a prompt; the rest of the length is the completion."""


def v5e_preset(model: str) -> str:
    """Returns the name of a model's preset for a v5e-8."""
    return f"{model}_gsm8k_v5e8"


def v5e_config(model: str, *, length: int, devices: int = 1, **changes: Any) -> Config:
    """Returns the model's v5e-8 preset for sequences of `length`, with other changes.

    LoRA of rank 32 on all matrices, given sizes, one sequence a device, and full rematerialization
    unless `plan__remat` is given.
    """
    settings = {
        "lora__rank": 32,
        "lora__alpha": 64.0,
        "plan__placement": "colocated",
        "plan__remat": "full",
        "plan__learner_devices": devices,
        "plan__row_tokens": length,
        "plan__micro_batch_tokens": length * devices,
        "plan__slots": 16 * devices,
        "plan__slot_buckets": [],
        "plan__prompt_buckets": [],
        "rollout__max_prompt_tokens": PROMPT,
        "rollout__max_new_tokens": length - PROMPT,
    }
    return preset(v5e_preset(model), **settings | changes)


def planned(config: Config) -> Config:
    """Returns the configuration with the placement and the sizes that a run begins with."""
    config = with_chosen_placement(config, None)
    return sized(config, first_sizes(config, None))


def figures(config: Config, program: str, *, beside: int = 0) -> dict[str, Any]:
    """Returns the compiler's figures of a program of a run.

    Args:
        config: the run.
        program: its name, see `pipeline.plan.program_names`.
        beside: bytes of a chip that are in use while the program runs, without its own.

    Returns:
        `fits`; `gib` in use on a chip, or needed (None if the compiler names no size); estimated
        `ms` of one run, None if it does not fit; `compile_s`.
    """
    found = compile_programs(config, shape_of(config), [program])[program]
    gib = None if found.hbm_bytes is None else (found.hbm_bytes + beside) / GIB
    ms = 1e3 * found.seconds if found.fits else None
    return {
        "fits": found.fits and gib is not None and gib <= HBM_GIB,
        "gib": gib,
        "ms": ms,
        "compile_s": found.compile_s,
    }


def traced_figures(
    traced: jax.stages.Traced,
    *,
    beside: int = 0,
    timed: bool = True,
    trips: float | None = None,
) -> dict[str, Any]:
    """Returns the compiler's figures of another program, as `figures` does.

    Args:
        traced: the program.
        beside: see `figures`.
        timed: false for a program with a loop whose trip count depends on its arguments, if `trips`
            is not known; `ms` is None then.
        trips: the expected trip count of such a loop.
    """
    began = time.monotonic()
    try:
        program = compile_for(traced)
    except DoesNotFitError as error:
        compile_s = time.monotonic() - began
        return {"fits": False, "gib": error.needs_gib, "ms": None, "compile_s": compile_s}
    gib = (program.hbm_bytes + beside) / GIB
    return {
        "fits": gib <= HBM_GIB,
        "gib": gib,
        "ms": 1e3 * program_seconds(program.parts(trips=trips)) if timed else None,
        "compile_s": time.monotonic() - began,
    }
