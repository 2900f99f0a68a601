"""Memory of one program of a run: the planner's estimate and the TPU compiler's figure."""

from __future__ import annotations

from typing import Any

from configs.schema import Config
from launch.bench.models import bench_config
from pipeline.contracts.programs import split_name
from pipeline.contracts.topology import GIB, HBM_GIB
from pipeline.inputs.hub.model_shape import shape_of
from pipeline.plan.compiler import compile_programs
from pipeline.plan.cost_model.program_memory import program_memory


def compared(*, model: str, program: str, length: int, **settings: Any) -> dict[str, Any]:
    """Returns both figures in GiB of a chip, arguments and results included.

    Args:
        model: whose v5e-8 preset is used, on one chip unless `settings` override that.
        program: its name; slots and rows are counted over all chips.
        length: positions of a prompt and its completion, and of a packed row.
        settings: further settings, `table__key=value`.

    Returns:
        `estimated_gib`, `compiled_gib`, the relative error of the estimate in percent, the
        compiler's share of a chip, and the seconds of compilation. If the program does not fit,
        `compiled_gib` is absent and `refused` is whether the estimate does not fit, either.
    """
    config = _config(model, program, length=length, settings=settings)
    shape = shape_of(config)
    estimated = sum(program_memory(config, shape, program).values()) / GIB
    found = compile_programs(config, shape, [program])[program]
    figures = {"estimated_gib": estimated, "compile_s": found.compile_s}
    if not found.fits or found.hbm_bytes is None:
        needs = None if found.hbm_bytes is None else found.hbm_bytes / GIB
        return {**figures, "needs_gib": needs, "refused": estimated > HBM_GIB}
    gib = found.hbm_bytes / GIB
    return {
        **figures,
        "compiled_gib": gib,
        "error_percent": 100 * (estimated / gib - 1),
        "share": gib / HBM_GIB,
    }


def _config(model: str, program: str, *, length: int, settings: dict[str, Any]) -> Config:
    devices = settings.pop("plan__learner_devices", 1)
    kind, size = split_name(program)
    shards = devices // settings.get("plan__tp", 1)
    rows = size if kind in {"score", "reference_top_k", "gradient"} else shards
    slots = size if kind == "segment" else 16 * devices
    return bench_config(
        model,
        length=length,
        plan__learner_devices=devices,
        plan__micro_batch_tokens=rows * length,
        plan__slots=settings.pop("plan__slots", slots),
        plan__slot_buckets=[],
        plan__prompt_buckets=[],
        **settings,
    )
