"""Memory and estimated time of programs on v5e chips, by the TPU compiler, without a TPU.

Programs of a run are compiled as `launch.plan --verify` compiles them, and their reports are kept
as there; the peer's, and single parts of ours, are compiled in this process.
"""

from __future__ import annotations

import time
from typing import Any

import jax

from configs.schema import Config
from launch.bench.small_gemma import one_device
from pipeline.compute.aot.compile import DoesNotFitError, compile_for
from pipeline.data.models.find_shape import shape_of
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.compiler import compile_programs
from pipeline.plan.topology import GIB, HBM_GIB


def v5e_config(
    model: str, *, slots: int, prompt: int, new: int, devices: int = 1, **changes: Any
) -> Config:
    """Returns the model's v5e-8 preset with a LoRA of rank 32 and full rematerialization.

    Args:
        model: of the preset.
        slots: of all devices.
        prompt: tokens of a prompt.
        new: tokens of a completion.
        devices: chips, each with one sequence of a micro-batch.
        changes: other settings, as `table__key=value`.
    """
    settings = {
        "lora__rank": 32,
        "lora__alpha": 64.0,
        "plan__remat": "full",
        "plan__learner_devices": devices,
        "plan__micro_batch_tokens": (prompt + new) * devices,
    }
    name = f"{model}_gsm8k_v5e8"
    return one_device(name, slots=slots, prompt=prompt, new=new, **settings | changes)


def figures(
    config: Config, program: str, *, beside: int = 0, shape: ModelShape | None = None
) -> dict[str, Any]:
    """Returns the compiler's figures of a program of a run.

    Args:
        config: the run.
        program: its name, see `pipeline.plan.program_names`.
        beside: bytes of a chip that are in use while the program runs, without its own.
        shape: of the model, if it is not that of `model.path`.

    Returns:
        `fits`; `gib` in use on a chip, or needed (None if the compiler names no size); estimated
        `ms` of one run, None if it does not fit; `compile_s`.
    """
    found = compile_programs(config, shape or shape_of(config), [program])[program]
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
        "ms": 1e3 * program.seconds(trips=trips) if timed else None,
        "compile_s": time.monotonic() - began,
    }
