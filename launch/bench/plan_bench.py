"""`python -m launch.bench plan`: the planner's estimates of memory against the TPU compiler's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launch.bench.child import CPU_ONLY
from launch.bench.table import Benchmark, Claim, Column, Figures, Row, Section
from pipeline.contracts.topology import HBM_GIB

FULL = 0.6
"""Share of a chip above which the narrow bounds hold."""
UNDER, OVER, AWAY = -5.0, 10.0, 25.0
"""Bounds of the error in percent: the first two above `FULL`, otherwise plus or minus the third."""

FITTED, CHECKED = "fitted", "checked"
"""Whether the estimate's constants were fitted to a row, or checked against it."""

_COLUMNS = (
    Column("rows", "constants"),
    Column("estimated_gib", "estimated, GiB", "{:.2f}"),
    Column("compiled_gib", "compiled, GiB", "{:.2f}"),
    Column("share", "of a chip", "{:.0%}"),
    Column("error_percent", "error, %", "{:+.1f}"),
    Column("needs_gib", "does not fit; the compiler, GiB", "{:.2f}"),
    Column("compile_s", "compiled in s", "{:.0f}"),
)


def _row(name: str, program: str, rows: str, *, length: int, **settings: Any) -> Row:
    model = settings.pop("model", "gemma3_1b")
    given = {"model": model, "program": program, "length": length, **settings}
    # The child starts the compiler in a separate process and environment.
    return Row(name, "launch.bench.plan_case:compared", given, CPU_ONLY, {"rows": rows})


def _slots(name: str, slots: int, rows: str, *, length: int = 1312, **settings: Any) -> Row:
    return _row(name, f"segment {slots}", rows, length=length, **settings)


def _prompts(name: str, rows: str, **settings: Any) -> Row:
    return _row(name, "prefill 256", rows, length=1312, **settings)


def _update(name: str, count: int, rows: str, *, length: int = 1024, **settings: Any) -> Row:
    return _row(name, f"gradient {count}", rows, length=length, **settings)


def _on(devices: int, *, fsdp: int = 1, tp: int = 1) -> dict[str, int]:
    return {"plan__learner_devices": devices, "plan__fsdp": fsdp, "plan__tp": tp}


_4B: dict[str, Any] = {"model": "gemma3_4b"}
_FSDP, _TP = _4B | _on(8, fsdp=8), _4B | _on(8, fsdp=4, tp=2)


def claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    """Claims the error bounds, for fitted rows and for checked rows."""
    for rows in (FITTED, CHECKED):
        known = {name: row for name, row in found.items() if row.get("rows") == rows}
        measured = {name: row for name, row in known.items() if "error_percent" in row}
        full = {name: row for name, row in measured.items() if row["share"] > FULL}
        rest = {name: row for name, row in measured.items() if name not in full}
        bounds = f"{UNDER:+.0f} to {OVER:+.0f}%"
        yield from _within(full, f"{rows}, over {FULL:.0%} of a chip: {bounds}", UNDER, OVER)
        yield from _within(rest, f"{rows}, others: within {AWAY:.0f}%", -AWAY, AWAY)
        for name, row in known.items():
            if "refused" in row:
                what = f"{name}: does not fit; estimated {row['estimated_gib']:.2f} of {HBM_GIB}"
                yield Claim(what, row["refused"])


def _within(found: Mapping[str, Figures], what: str, low: float, high: float) -> Iterator[Claim]:
    if not found:
        return
    errors = {name: row["error_percent"] for name, row in found.items()}
    good = [name for name, error in errors.items() if low <= error <= high]
    lowest, highest = min(errors, key=errors.__getitem__), max(errors, key=errors.__getitem__)
    yield Claim(
        f"{what}: {len(good)} of {len(errors)}, from {errors[lowest]:+.1f} ({lowest}) to "
        f"{errors[highest]:+.1f} ({highest})",
        len(good) == len(errors),
    )


_ABOUT = "a whole program, weights included"

BENCHMARK = Benchmark(
    (
        Section(
            "rollouts",
            f"Decoding a segment, {_ABOUT}; 1,312 positions, one chip, unless a row says otherwise",
            _COLUMNS,
            (
                _slots("1b, 512 slots", 512, FITTED),
                _slots("1b, 768 slots", 768, FITTED),
                _slots("1b, 768 slots, int8 KV", 768, FITTED, plan__kv_cache="int8"),
                _slots("1b, 896 slots", 896, CHECKED),
                _slots("1b, 64 slots of 4,096", 64, CHECKED, length=4096),
                _slots("270m, 256 slots", 256, CHECKED, model="gemma3_270m"),
                _slots("4b, 48 slots", 48, CHECKED, **_4B),
                _slots("4b, 8 chips, fsdp 8, 32 slots", 256, FITTED, **_FSDP),
                _slots("4b, 8 chips, fsdp 8, 48 slots", 384, CHECKED, **_FSDP),
            ),
            claims,
        ),
        Section(
            "prompts",
            f"Reading prompts of 256 positions, {_ABOUT}",
            _COLUMNS,
            (
                _prompts("1b, 4,096 positions", FITTED),
                _prompts(
                    "1b, 16,384 positions",
                    CHECKED,
                    plan__prefill_tokens=16_384,
                    plan__slots=64,
                ),
                _prompts("4b, 4,096 positions", CHECKED, **_4B),
            ),
            claims,
        ),
        Section(
            "scores",
            f"Log-probs and the likeliest 128 tokens of rows of 1,024 positions, {_ABOUT}",
            _COLUMNS,
            (
                _row("1b, score 2 rows", "score 2", FITTED, length=1024),
                _row("1b, reference_top_k 16 rows", "reference_top_k 16", CHECKED, length=1024),
            ),
            claims,
        ),
        Section(
            "update",
            f"The gradient of rows of 1,024 positions (a chip), {_ABOUT}; topk KL with k = 128",
            _COLUMNS,
            (
                _update("1b, 2 rows", 2, FITTED),
                _update("1b, 128 rows", 128, FITTED),
                _update(
                    "1b, 8 chips, none, a row of 2,048",
                    8,
                    FITTED,
                    length=2048,
                    plan__remat="none",
                    **_on(8),
                ),
                _update("1b, dots, 8 rows", 8, FITTED, plan__remat="dots"),
                _update("1b, dots, 4 rows", 4, CHECKED, plan__remat="dots"),
                _update("270m, 64 rows", 64, CHECKED, model="gemma3_270m"),
                _update("4b, 32 rows", 32, CHECKED, **_4B),
                _update("4b, 8 chips, fsdp 8, 2 rows", 16, FITTED, **_FSDP),
                _update("4b, 8 chips, fsdp 4, tp 2, 8 rows", 32, FITTED, **_TP),
            ),
            claims,
        ),
    )
)
