"""`python -m launch.bench plan`: the planner's estimates of memory beside the TPU compiler's.

Each row is one program of a run, weights included: its estimate by `pipeline.plan.cost_model`, and
the compiler's figure as `launch.plan --verify` uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launch.bench.harness import Benchmark, Claim, Figures, Row, Section
from launch.bench.v5e import figures, v5e_config
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.program_memory import program_memory
from pipeline.plan.program_names import split_name
from pipeline.plan.topology import GIB, HBM_GIB

FULL = 0.6
"""Share of a chip above which the narrow bounds hold."""
UNDER, OVER, AWAY = -5.0, 10.0, 25.0
"""Bounds of the error in percent: the first two above `FULL`, otherwise plus or minus the third."""


def compared(*, model: str, program: str, length: int, **settings: Any) -> dict[str, Any]:
    """Returns both figures in GiB of a chip, arguments and results included.

    Args:
        model: of which the v5e-8 preset is used, on one chip unless `settings` has `devices`.
        program: its name; slots and rows are counted over all chips.
        length: positions of a prompt and its completion, and of a packed row.
        settings: further settings, `table__key=value`.

    Returns:
        Also the compiler's share of a chip and the relative error of the estimate, both in percent;
        absent for a program that does not fit.
    """
    kind, size = split_name(program)
    own = {"plan__slots": size} if kind == "segment" else {}
    if kind in {"score", "reference_top_k", "gradient"}:
        own = {"plan__micro_batch_tokens": size * length}
    config = v5e_config(model, length=length, **own | settings)
    found = figures(config, program)
    estimated = sum(program_memory(config, shape_of(config), program).values()) / GIB
    about = {
        "estimated_gib": estimated,
        "compiled_gib": found["gib"],
        "fits": found["fits"],
        "compile_s": found["compile_s"],
    }
    if found["fits"]:
        about["share"] = 100 * found["gib"] / HBM_GIB
        about["error"] = 100 * (estimated / found["gib"] - 1)
    return about


def errors_are_bounded(found: Mapping[str, Figures]) -> Iterator[Claim]:
    """Claims the error bounds, and that no estimate fits where the program does not."""
    errors = {name: row["error"] for name, row in found.items() if "error" in row}
    full = {name: one for name, one in errors.items() if found[name]["share"] > 100 * FULL}
    rest = {name: one for name, one in errors.items() if name not in full}
    bounds = f"{UNDER:+.0f} to {OVER:+.0f}%"
    yield from _within(full, f"over {FULL:.0%} of a chip: {bounds}", UNDER, OVER)
    yield from _within(rest, f"others: within {AWAY:.0f}%", -AWAY, AWAY)
    for name, row in found.items():
        if row.get("fits") is False:
            what = f"{name}: does not fit; estimated {row['estimated_gib']:.2f} of {HBM_GIB}"
            yield Claim(what, row["estimated_gib"] > HBM_GIB)


def _within(errors: Mapping[str, float], what: str, low: float, high: float) -> Iterator[Claim]:
    if errors:
        bad = [f"{name} {one:+.1f}" for name, one in errors.items() if not low <= one <= high]
        extremes = f"from {min(errors.values()):+.1f} to {max(errors.values()):+.1f}"
        yield Claim("; ".join([f"{what}: {len(errors)} rows, {extremes}", *bad]), not bad)


def _row(
    name: str, program: str, *, model: str = "gemma3_1b", length: int = 1024, **settings: Any
) -> Row:
    arguments = {"model": model, "program": program, "length": length, **settings}
    return Row(name, compared, arguments)


def _sampler(name: str, program: str, *, length: int = 1312, **settings: Any) -> Row:
    return _row(name, program, length=length, **settings)


_ABOUT = (
    "1,312 positions of a slot, 256 of a prompt, 1,024 of a packed row, one chip, unless a row "
    "names others"
)
_4B: dict[str, Any] = {"model": "gemma3_4b"}
_FSDP = _4B | {"devices": 8, "plan__fsdp": 8, "plan__tp": 1}
_TP = _4B | {"devices": 8, "plan__fsdp": 4, "plan__tp": 2}
_LONG_PROMPTS = {"plan__prefill_tokens": 16_384, "plan__slots": 64}

BENCHMARK = Benchmark(
    (
        Section(
            "fitted",
            f"Rows that the estimate's constants were fitted to. {_ABOUT}",
            (
                _sampler("1b, 512 slots", "segment 512"),
                _sampler("1b, 768 slots", "segment 768"),
                _sampler("1b, 768 slots, int8 KV", "segment 768", plan__kv_cache="int8"),
                _sampler("4b, 8 chips, fsdp 8, 32 slots", "segment 256", **_FSDP),
                _sampler("1b, prompts of 4,096 positions", "prefill 256"),
                _row("1b, score 2 rows", "score 2"),
                _row("1b, gradient of 2 rows", "gradient 2"),
                _row("1b, gradient of 128 rows", "gradient 128"),
                _row(
                    "1b, 8 chips, gradient of a row of 2,048, none",
                    "gradient 8",
                    length=2048,
                    devices=8,
                    plan__remat="none",
                ),
                _row("1b, gradient of 8 rows, dots", "gradient 8", plan__remat="dots"),
                _row("4b, 8 chips, fsdp 8, gradient of 2 rows", "gradient 16", **_FSDP),
                _row("4b, 8 chips, fsdp 4, tp 2, gradient of 8 rows", "gradient 32", **_TP),
            ),
            (errors_are_bounded,),
        ),
        Section(
            "checked",
            f"Rows that the estimate's constants were not fitted to. {_ABOUT}",
            (
                _sampler("1b, 896 slots", "segment 896"),
                _sampler("1b, 64 slots of 4,096", "segment 64", length=4096),
                _sampler("270m, 256 slots", "segment 256", model="gemma3_270m"),
                _sampler("4b, 48 slots", "segment 48", **_4B),
                _sampler("4b, 8 chips, fsdp 8, 48 slots", "segment 384", **_FSDP),
                _sampler("1b, prompts of 16,384 positions", "prefill 256", **_LONG_PROMPTS),
                _sampler("4b, prompts of 4,096 positions", "prefill 256", **_4B),
                _row("1b, top-k tokens of 16 rows", "reference_top_k 16"),
                _row("1b, gradient of 4 rows, dots", "gradient 4", plan__remat="dots"),
                _row("270m, gradient of 64 rows", "gradient 64", model="gemma3_270m"),
                _row("4b, gradient of 32 rows", "gradient 32", **_4B),
            ),
            (errors_are_bounded,),
        ),
    ),
    needs_compiler=True,
)
