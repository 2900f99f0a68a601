"""`python -m launch.bench schedule`: time of a preset's programs by part, beside the roofline.

By the TPU compiler's estimates and final schedules, without a TPU; see `aot.estimated_time`. The
programs are compiled as `launch.plan --verify` compiles them, and their reports are kept as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from configs.schema import Config
from launch.bench.decode_attention import by_layer
from launch.bench.harness import Benchmark, Claim, Figures, Row, Section
from launch.bench.small_gemma import preset
from launch.bench.v5e import planned, v5e_config, v5e_preset
from pipeline.data.batching import Packing
from pipeline.plan.compiler import compile_programs
from pipeline.plan.cost_model.programs import phase_programs
from pipeline.plan.lengths import Lengths
from pipeline.plan.program_names import split_name
from pipeline.plan.search.fitting import PlanCase, choose_placement
from pipeline.plan.topology import GIB, TPU_COMPILER
from pipeline.plan.verify import verify

MODEL = "gemma3_1b"
"""Whose preset is measured."""
SLOTS, LENGTH = 512, 1312
"""Slots of a chip, and positions of a prompt and its completion, of the rows with full slots."""
LEAST = 0.95
"""Smallest allowed estimate of the planner as a share of a compiled time."""


def by_position(*, phase: str, **changes: str) -> dict[str, Any]:
    """Returns microseconds a packed position of the largest program of a phase of the preset.

    Args:
        phase: "prefill", where a position is one of a prompt, "score" or "update".
        changes: of the preset, as `table__key=value`.
    """
    config = planned(preset(v5e_preset(MODEL), **changes))
    name = phase_programs(config)[phase][-1]
    kind, size = split_name(name)
    if kind == "prefill":
        positions = config.prefill_rows(size) * size
    else:
        positions = size * config.row_tokens // config.plan.learner_shards
    found = times(config, name, unit_s=1e-6 * positions)
    if kind == "prefill" or "total" not in found:
        return found
    of_rollout = Packing.expected(config, Lengths.expected(config)).positions
    return found | {"positions_of_rollout": of_rollout, "of_rollout": of_rollout * found["total"]}


def by_step(
    *, slots: int | None = None, kv_cache: str = "model", weights: str = "shared"
) -> dict[str, Any]:
    """Returns milliseconds of a decode step, a segment's flush included.

    Args:
        slots: of one chip, for sequences of `LENGTH`; None: the preset's slots and sequences.
        kv_cache: of `plan.kv_cache`.
        weights: of `plan.rollout_weights`.
    """
    settings: dict[str, Any] = {"plan__kv_cache": kv_cache, "plan__rollout_weights": weights}
    if weights != "shared":
        settings["learner__importance_cap"] = 2.0
    if slots is None:
        config = planned(preset(v5e_preset(MODEL), **settings))
    else:
        config = v5e_config(MODEL, length=LENGTH, plan__slots=slots, **settings)
    return times(config, f"segment {config.slots}", unit_s=1e-3 * config.segment_steps)


def times(config: Config, name: str, *, unit_s: float) -> dict[str, Any]:
    """Returns the time of a program and of its parts, its roofline and the planner's estimate.

    Args:
        config: the run.
        name: of the program.
        unit_s: seconds that count as one.
    """
    case = PlanCase.of(config)
    found = compile_programs(config, case.shape, [name])[name]
    size = {"program": name, "gib": None if found.hbm_bytes is None else found.hbm_bytes / GIB}
    if not found.fits:
        return {**size, "fits": False}
    planned = case.roofline(config).program(name, Packing.expected(config, case.lengths))
    parts = {part: time["seconds"] / unit_s for part, time in found.parts.items()}
    return {
        **size,
        "total": found.seconds / unit_s,
        "roofline": planned.low / unit_s,
        "roofline_percent": 100 * planned.low / found.seconds,
        "planned": planned.expected / unit_s,
        "modelled": found.modelled_s / unit_s,
        "traffic": sum(time["traffic_s"] for time in found.parts.values()) / unit_s,
        **parts,
    }


def step() -> dict[str, Any]:
    """Returns the seconds of a step of the preset by phase, beside the roofline of its programs.

    The roofline counts slots and rows that stay empty, and no host work, which is estimated.
    """
    case = PlanCase.of(preset(v5e_preset(MODEL)))
    plan = choose_placement(case).chosen
    found = verify(case, plan, say=lambda _: None).plan.step
    low = sum(found.seconds[phase].low for phase in phase_programs(plan.config))
    return {
        "total": found.total.expected,
        "roofline": low,
        "roofline_percent": 100 * low / found.total.expected,
        "planned": plan.step.total.expected,
        **{phase: seconds.expected for phase, seconds in found.seconds.items()},
        "tokens_per_s": found.tokens_per_s,
    }


def the_plan_is_no_underestimate(found: Mapping[str, Figures]) -> Iterator[Claim]:
    """Claims that the planner's estimates are not much shorter than the compiled programs."""
    for name, row in found.items():
        if "planned" in row:
            share = row["planned"] / row["total"]
            yield Claim(
                f"{name}: planned {share:.2f} of the total (at least {LEAST})", share >= LEAST
            )


_PARTS = (
    "planned: the planner's estimate; modelled: what the compiler has no estimate of (sorts, "
    "gathers, updates in place, kernels), by its final schedule and its traffic; traffic: bytes of "
    "HBM at 819 GB/s; waits: for copies to VMEM"
)

BENCHMARK = Benchmark(
    (
        Section(
            "positions",
            f"µs a packed position on a chip, and a rollout; {_PARTS}",
            (
                Row("reference top k", by_position, {"phase": "score"}),
                Row("gradient", by_position, {"phase": "update"}),
                Row(
                    "gradient, attention in blocks",
                    by_position,
                    {"phase": "update", "plan__attention": "blocked"},
                ),
                Row(
                    "gradient, a prompt for each rollout",
                    by_position,
                    {"phase": "update", "learner__share_prefix": "false"},
                ),
                Row("prefill", by_position, {"phase": "prefill"}),
            ),
            (the_plan_is_no_underestimate,),
        ),
        Section(
            "decode",
            f"ms a decode step, flush of the segment included; {_PARTS}",
            (
                Row("the preset's slots", by_step),
                Row("the same, weights merged", by_step, {"weights": "merged"}),
                Row(
                    f"{SLOTS} slots a chip, {LENGTH:,} positions",
                    by_step,
                    {"slots": SLOTS},
                ),
                Row(
                    f"{SLOTS} slots a chip, {LENGTH:,} positions, int8 caches",
                    by_step,
                    {"slots": SLOTS, "kv_cache": "int8"},
                ),
                Row(
                    f"{SLOTS} slots a chip, {LENGTH:,} positions, int8 caches, weights merged",
                    by_step,
                    {"slots": SLOTS, "kv_cache": "int8", "weights": "merged"},
                ),
            ),
            (the_plan_is_no_underestimate,),
        ),
        Section(
            "layer",
            "µs of the decode attention of one layer, to rings of 512 positions and 32 recent ones",
            [
                Row(f"{slots} slots, {kv_cache}, {kernel}", by_layer, {"slots": slots} | given)
                for slots, kv_cache in ((64, "model"), (SLOTS, "model"), (SLOTS, "int8"))
                for kernel in ("ours", "flash", "paged")
                if (kv_cache, kernel) != ("int8", "flash")
                for given in [{"kv_cache": kv_cache, "kernel": kernel}]
            ],
            environment=TPU_COMPILER,
        ),
        Section(
            "step",
            "Seconds of a step of the preset by phase, at its expected lengths",
            (Row("step", step),),
            (the_plan_is_no_underestimate,),
        ),
    ),
    needs_compiler=True,
)
