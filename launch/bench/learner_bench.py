"""`python -m launch.bench learner`: cost of logits on this machine's CPU, beside peers.

Bytes, unlike seconds, are counted in programs compiled for a v5e chip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launch.bench.child import CPU_ONLY
from launch.bench.table import Benchmark, Claim, Column, Figures, Row, Section
from pipeline.contracts.topology import TPU_COMPILER

_EXACT = {"float32": 1e-5, "bfloat16": 1e-2}
_MEANS = (296, 448, 576)

_GRADIENT = (
    Column("ours_mib", "temporaries, ours, MiB", "{:,.0f}"),
    Column("theirs_mib", "Tunix", "{:,.0f}"),
    Column("memory_ratio", "ratio", "{:.0f}"),
    Column("ours_s", "step, ours, s", "{:.2f}"),
    Column("theirs_s", "Tunix", "{:.2f}"),
    Column("time_ratio", "ratio", "{:.2f}"),
    Column("apart", "gradients differ by", "{:.1e}"),
    Column("not_run", "too large to run"),
)
_PACKING = (
    Column("programs", "programs"),
    *(Column(f"padding_{mean}", f"padding, %, mean {mean}", "{:.1f}") for mean in _MEANS),
    *(Column(f"gflop_{mean}", f"GFLOP a token, mean {mean}", "{:.2f}") for mean in _MEANS),
)


def _packing(name: str, **how: Any) -> Row:
    return Row(name, "launch.bench.packing:scheme", how, CPU_ONLY)


def _gradient_claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    for name, row in found.items():
        ratio = row.get("memory_ratio", 0)
        yield Claim(f"{name}: {ratio:.0f} times fewer temporaries than Tunix (10)", ratio >= 10)
        if "time_ratio" in row:
            speed = row["time_ratio"]
            yield Claim(f"{name}: {speed:.2f} times as fast as Tunix (1)", speed >= 1)


def _exact_claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    for name, row in found.items():
        apart, bound = row.get("apart", float("inf")), _EXACT[name]
        yield Claim(f"{name}: {apart:.1e} of a leaf's norm apart ({bound:.0e})", apart <= bound)
        if "whole_rounded" in row:
            ours, whole = row["ours_rounded"], row["whole_rounded"]
            what = f"{name}: {ours:.1e} from the float32 gradient, whole logits {whole:.1e}"
            yield Claim(f"{what} (1.1 times)", ours <= 1.1 * whole)


def _top_k_claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    for name, row in found.items():
        speed = row.get("time_ratio", 0)
        yield Claim(f"{name}: {speed:.1f} times as fast as the recipe (2)", speed >= 2)
        same = row.get("apart", 1) < 1e-4 and row.get("other_tokens") == 0
        yield Claim(f"{name}: the same log-probs and tokens", same)


def _read_claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    for name, row in found.items():
        ratio = row.get("ratio", 0)
        yield Claim(f"{name}: {ratio:.0f} times fewer bytes than the recipe (100)", ratio >= 100)


def _mixed_claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    for name, row in found.items():
        yield Claim(f"{name}: nothing compiled", row.get("compiled") == 0)


BENCHMARK = Benchmark(
    (
        Section(
            "gradient",
            "The gradient of a LoRA under 262,144 entries: two layers, width 64, sequences of "
            "256 + 768 tokens, float32; medians of runs in turns",
            _GRADIENT,
            tuple(
                Row(
                    f"{1024 * count:,} tokens",
                    "launch.bench.small_body:memory_and_time",
                    {"sequences": count, "repeats": 3},
                    CPU_ONLY,
                )
                for count in (1, 4, 8)
            ),
            _gradient_claims,
        ),
        Section(
            "exact",
            "The same gradient against whole logits in float32: the LoRA's worst leaf, relative "
            "to its norm; and how far rounding in the body takes both",
            (
                Column("tokens", "tokens", "{:,}"),
                Column("apart", "apart", "{:.1e}"),
                Column("ours_rounded", "ours from float32's", "{:.1e}"),
                Column("whole_rounded", "whole logits from float32's", "{:.1e}"),
            ),
            tuple(
                Row(
                    dtype,
                    "launch.bench.small_body:exactness",
                    {"sequences": 1, "dtype": dtype},
                    CPU_ONLY,
                )
                for dtype in _EXACT
            ),
            _exact_claims,
        ),
        Section(
            "top_k",
            "The exact top 128, width 1152, against the public recipe (whole logits of one "
            "position of each row in a scan, lax.top_k); float32, medians of runs in turns",
            (
                Column("ours_s", "ours, s", "{:.2f}"),
                Column("theirs_s", "recipe, s", "{:.2f}"),
                Column("time_ratio", "ratio", "{:.1f}"),
                Column("apart", "log-probs differ by", "{:.1e}"),
                Column("other_tokens", "other tokens"),
            ),
            tuple(
                Row(
                    f"8 rows x {seq}",
                    "launch.bench.recipe:speed",
                    {"rows": 8, "seq": seq, "repeats": 3},
                    CPU_ONLY,
                )
                for seq in (16, 64)
            ),
            _top_k_claims,
        ),
        Section(
            "reads",
            "Embedding that a position reads in both programs, compiled for a v5e chip, bfloat16",
            (
                Column("ours_mb", "ours, MB", "{:.2f}"),
                Column("theirs_mb", "recipe, MB", "{:.2f}"),
                Column("ratio", "ratio", "{:.0f}"),
            ),
            (
                Row(
                    "8 rows x 512",
                    "launch.bench.recipe:embedding_reads",
                    {"rows": 8, "seq": 512},
                    TPU_COMPILER,
                ),
            ),
            _read_claims,
        ),
        Section(
            "packing",
            "512 rollouts of at most 1,024 tokens on 8 devices, lengths lognormal, micro-batches "
            "of 65,536 positions, gemma3-1b: empty positions, and arithmetic for each real token",
            _PACKING,
            (
                _packing("a row each", buckets=(1024,)),
                _packing("four length buckets", buckets=(256, 512, 768, 1024)),
                *(_packing(f"packed rows of {row:,}", row=row) for row in (1024, 2048, 4096)),
            ),
        ),
        Section(
            "mixed",
            "Updates of the demo's learner on rollouts of mixed lengths, after the first",
            (
                Column("steps", "updates"),
                Column("rollouts", "rollouts", "{:,}"),
                Column("tokens", "tokens", "{:,}"),
                Column("compiled", "compiled"),
            ),
            (
                Row(
                    "mixed lengths",
                    "launch.bench.mixed:updates",
                    {"steps": 12},
                    CPU_ONLY,
                ),
            ),
            _mixed_claims,
        ),
    )
)
