"""`python -m launch.bench sweep`: speed and memory of rollouts by number of slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from launch.bench.child import CPU_ONLY
from launch.bench.claims import invariant_3
from launch.bench.table import Benchmark, Claim, Column, Figures, Row, Section
from pipeline.contracts.topology import TPU_COMPILER

POSITIONS = 1312
"""Positions of a prompt and its completion on a v5e chip, unless a row names others."""
SMALL_POSITIONS = 320
"""Positions of a prompt and its completion of the small model."""
_HERE = (1, 2, 4, 8, 16, 32, 64)
_TOP_K = "top k of 64"
_SLOW = 0.9
"""Smallest allowed ratio of tokens a second when a few slots are added."""

_WEIGHTS: dict[str, dict[str, Any]] = {
    # Rounded weights require importance_cap, which the sampler does not use.
    **{
        kind: {"plan__rollout_weights": kind, "learner__importance_cap": 2.0}
        for kind in ("merged", "int8", "int8_matmul")
    },
    "int8 KV": {"plan__kv_cache": "int8"},
}
"""Settings by series."""

_V5E = (
    Column("segment_program_gib", "GiB, the program", "{:.2f}"),
    Column("copied_gib", "the learner's matrices", "{:.2f}"),
    Column("step_ms", "ms a step, estimated", "{:.2f}"),
    Column("tokens_per_s", "tokens/s", "{:,.0f}"),
    Column("kv_mb", "KV MB a sequence", "{:.1f}"),
    Column("invariant_3", "no whole logits"),
)
_MEASURED = (
    Column("device", "device"),
    Column("total_mib", "MiB, the program", "{:.1f}"),
    Column("step_ms", "ms a step", "{:.2f}"),
    Column("tokens_per_s", "tokens/s", "{:,.0f}"),
)
_SMALL = (
    "a Gemma 3 of seven layers, width 128, window 64 and 512 entries, float32, LoRA of rank 16, "
    f"{SMALL_POSITIONS} positions unless a row says otherwise; every slot busy at half of its "
    "positions, median of 20 warm segments of 8 steps"
)


def _v5e(series: str, *, slots: int, length: int = POSITIONS, **settings: Any) -> Row:
    """A row by the TPU compiler; `settings` as `table__key`."""
    return Row(
        _named(series, slots),
        "launch.bench.rollout_memory:decoding",
        {"model": "gemma3_1b", "slots": slots, "length": length, **settings},
        TPU_COMPILER,
        {"place": "v5e", "series": series, "slots": slots},
    )


def _here(place: str, environment: Mapping[str, str]) -> tuple[Row, ...]:
    """Measured rows of all series and slots."""
    series: dict[str, dict[str, Any]] = {
        "LoRA": {},
        "merged": {"plan__rollout_weights": "merged"},
        _TOP_K: {"rollout__top_k": 64},
        "int8 KV": {"plan__kv_cache": "int8"},
        "128 positions": {"length": 128},
        "1,280 positions": {"length": 1280},
    }
    return tuple(
        Row(
            _named(name, slots),
            "launch.bench.sweep_speed:segments",
            {"slots": slots, "length": SMALL_POSITIONS, "repeats": 20, **settings},
            environment,
            {"place": place, "series": name, "slots": slots},
        )
        for name, settings in series.items()
        for slots in _HERE
    )


def _named(series: str, slots: int) -> str:
    return f"{series}, {slots} slot{'s' if slots > 1 else ''}"


def _grows(found: Mapping[str, Figures], key: str) -> Iterator[Claim]:
    """Claims that memory grows with slots, for each series with several rows."""
    sizes: dict[str, dict[int, float]] = {}
    for row in found.values():
        # For a program that does not fit, the size that the compiler names, if it names one.
        size = row.get(key, row.get("needs_gib"))
        if size is not None:
            sizes.setdefault(row["series"], {})[row["slots"]] = size
    for series, by_slots in sizes.items():
        held = [by_slots[slots] for slots in sorted(by_slots)]
        if len(held) > 1:
            never_falls = all(small <= large for small, large in pairwise(held))
            holds = never_falls and held[0] < held[-1]
            yield Claim(f"{series}: memory grows with the slots", holds)


def _v5e_claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    yield from invariant_3(found)
    yield from _grows(found, "total_gib")


def _top_k_claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    yield from _v5e_claims(found)
    for slots, more in ((64, 72), (128, 136)):
        before, after = (found.get(_named(_TOP_K, count)) for count in (slots, more))
        if before is None or after is None:
            continue
        share = after.get("tokens_per_s", 0) / before.get("tokens_per_s", float("inf"))
        what = f"no slow spot: {more} slots give {share:.2f} of the tokens/s of {slots} ({_SLOW})"
        yield Claim(what, share >= _SLOW)


def _measured_claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    yield from _grows(found, "total_mib")


def _v5e_section(name: str, title: str, rows: Sequence[Row]) -> Section:
    about = (
        f"gemma3-1b, LoRA of rank 32 on all matrices, one v5e chip, by the TPU compiler: {title}"
    )
    return Section(name, about, _V5E, rows, _top_k_claims if "top-k" in name else _v5e_claims)


BENCHMARK = Benchmark(
    (
        _v5e_section(
            "v5e slots",
            f"sequences of {POSITIONS:,} positions",
            [_v5e("LoRA", slots=count) for count in (1, 8, 32, 64, 96, 128, 256, 512, 768)],
        ),
        _v5e_section(
            "v5e weights",
            "plan.rollout_weights and plan.kv_cache; where the sampler runs a copy of the "
            "learner's matrices, these are on the chip, too",
            [
                _v5e(series, slots=count, **settings)
                for series, settings in _WEIGHTS.items()
                for count in (64, 512)
            ],
        ),
        _v5e_section(
            "v5e top-k",
            "rollout.top_k = 64",
            [_v5e(_TOP_K, slots=count, rollout__top_k=64) for count in (64, 72, 128, 136, 256)],
        ),
        _v5e_section(
            "v5e lengths",
            "shorter and longer sequences",
            [
                _v5e(f"{length:,} positions", slots=count, length=length)
                for length in (512, 4096)
                for count in (64, 256)
            ],
        ),
        Section(
            "cpu",
            f"Measured on this machine's CPU: {_SMALL}",
            _MEASURED,
            _here("cpu", CPU_ONLY),
            _measured_claims,
        ),
        Section(
            "accelerator",
            f"Measured on the accelerator that JAX finds here: {_SMALL}",
            _MEASURED,
            # JAX chooses the platform, independent of this process's environment.
            _here("accelerator", {"JAX_PLATFORMS": ""}),
            _measured_claims,
            needs="launch.bench.sweep_speed:accelerator",
        ),
    ),
    plot="launch.bench.sweep_plot:write",
    plot_file="rollout_sweep.png",
)
