"""`python -m launch.bench hbm`: memory on a v5e chip by the TPU compiler, ours and Tunix's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launch.bench.claims import invariant_3
from launch.bench.models import preset_sequences
from launch.bench.table import Benchmark, Claim, Column, Figures, Row, Section
from pipeline.contracts.topology import TPU_COMPILER

MOST, MOST_GIB = "128", 13.75
"""Sequences whose gradient must fit into this part of a chip; the rest is for the sampler."""
NEAR_BEST = 1.03
"""A micro-batch is large enough if its time a token is at most this multiple of the best."""

_LADDER = (1, 2, 4, 8, 16, 128, 160)

_MEMORY = (
    Column("arguments_gib", "arguments, GiB", "{:.2f}"),
    Column("temporary_gib", "temporaries", "{:.2f}"),
    Column("optimizer_gib", "Adam", "{:.2f}"),
    Column("total_gib", "**together**", "**{:.2f}**"),
)
_TIME = (
    Column("estimated_ms", "estimated ms", "{:.0f}"),
    Column("us_per_token", "µs a token", "{:.2f}"),
    Column("invariant_3", "no whole logits"),
    Column("compile_s", "compiled in s", "{:.0f}"),
)
_HOST = (Column("host_gib", "host, GiB", "{:.2f}"),)
_HEAD = (
    Column("temporary_mib", "temporaries, MiB", "{:.2f}"),
    *_TIME,
)


def _ours(name: str, *, sequences: int, length: int = 1024, **arguments: Any) -> Row:
    model = arguments.pop("model", "gemma3_1b")
    shape = {"model": model, "sequences": sequences, "length": length}
    return Row(name, "launch.bench.ours:gradient", shape | arguments, TPU_COMPILER)


def _theirs(name: str, *, sequences: int, **arguments: Any) -> Row:
    model = arguments.pop("model", "gemma3_1b")
    shape = {"model": model, "sequences": sequences, "length": 1024}
    return Row(name, "launch.bench.theirs:gradient", shape | arguments, TPU_COMPILER)


def _head(name: str, **arguments: Any) -> Row:
    shape = {"model": "gemma3_1b", "tokens": 65_536}
    return Row(name, "launch.bench.ours:head", shape | arguments, TPU_COMPILER)


def _fit(found: Mapping[str, Figures]) -> Iterator[Claim]:
    yield from invariant_3(found)
    for name, row in found.items():
        yield Claim(f"{name}: fits", row.get("fits") is True)


def _ladder_claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    yield from invariant_3(found)
    fits = {name: row for name, row in found.items() if row.get("fits")}
    if MOST in found:
        gib = fits[MOST]["total_gib"] if MOST in fits else float("inf")
        yield Claim(f"{MOST} sequences in {MOST_GIB} GiB: {gib:.2f}", gib <= MOST_GIB)
    if len(fits) > 1:
        best = min(row["us_per_token"] for row in fits.values())
        name = next(n for n, row in fits.items() if row["us_per_token"] <= NEAR_BEST * best)
        row, preset = fits[name], str(preset_sequences("gemma3_1b", length=1024))
        yield Claim(
            f"the smallest micro-batch within 3% of the best time a token ({best:.2f} µs) is the "
            f"preset's of {preset}: {name} sequences, {row['us_per_token']:.2f} µs, "
            f"{row['total_gib']:.2f} GiB",
            name == preset,
        )


def _head_claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    yield from invariant_3(found)
    for name, row in found.items():
        mib = row.get("temporary_mib", float("inf"))
        yield Claim(f"{name}: under 16 MiB of temporaries: {mib:.2f}", mib < 16)


_POLICIES = (
    *(
        _ours(f"remat {policy}, {count} sequences", sequences=count, plan__remat=policy)
        for policy, count in (
            ("none", 4),
            ("dots", 4),
            ("full", 4),
            ("offload", 32),
            ("offload", 128),
        )
    ),
    *(
        _ours(f"{tokens} positions a layer, 32 sequences", sequences=32, plan__layer_tokens=tokens)
        for tokens in (1024, 4096, 8192, 32_768)
    ),
    _ours("splash attention, 8 sequences", sequences=8, plan__attention="splash"),
    _ours("int8 base, 8 sequences", sequences=8, model__quantization="int8"),
    _ours("int8 products, 8 sequences", sequences=8, model__quantization="int8_matmul"),
    _ours("KL k3, 128 sequences", sequences=128, learner__kl="k3"),
    _ours("top k in bfloat16, 128 sequences", sequences=128, learner__top_k_dtype="bfloat16"),
    _ours("all 8 chips, 8 sequences each", sequences=8, devices=8),
)

BENCHMARK = Benchmark(
    (
        Section(
            "gradient",
            "Ours, gemma3-1b, LoRA of rank 32 on all matrices, topk KL with k = 128, sequences of "
            "256 + 768 tokens on one v5e chip: one backward for all of them",
            (*_MEMORY, *_TIME),
            tuple(_ours(str(count), sequences=count) for count in _LADDER),
            _ladder_claims,
        ),
        Section(
            "choices",
            "Ours, gemma3-1b, effect of the settings (estimates ignore splash's kernels and "
            "copies to the host)",
            (*_MEMORY, *_HOST, *_TIME),
            _POLICIES,
            invariant_3,
        ),
        Section(
            "large",
            "Ours, long sequences; and gemma3-4b on all 8 chips",
            (*_MEMORY, *_TIME),
            (
                _ours("10 x 8,192 tokens", sequences=10, length=8192),
                _ours(
                    "gemma3-4b, fsdp 8, 8 x 1,024 a chip",
                    model="gemma3_4b",
                    sequences=8,
                    devices=8,
                    plan__fsdp=8,
                    plan__tp=1,
                ),
                _ours(
                    "gemma3-4b, fsdp 4, tp 2, 8 x 1,024 a chip",
                    model="gemma3_4b",
                    # Both chips of a tp pair compute the same rows.
                    sequences=8,
                    devices=8,
                    plan__fsdp=4,
                    plan__tp=2,
                ),
            ),
            _fit,
        ),
        Section(
            "head",
            "The head as a separate program, width 1152, 65,536 tokens",
            _HEAD,
            (
                _head("log-probs and gradient", what="gradient", head_tokens=2048, head_vocab=8192),
                _head("top 128", what="top_k", head_tokens=2048, head_vocab=8192),
            ),
            _head_claims,
        ),
        Section(
            "tunix",
            "Tunix 0.1.7's GRPO loss, the same model, LoRA and lengths (sequences a chip)",
            (*_MEMORY, *_TIME),
            (
                *(
                    _theirs(f"base on every chip, {count}", sequences=count)
                    for count in (1, 4, 8, 9)
                ),
                *(
                    _theirs(
                        f"base on every chip, remat repaired, {count}", sequences=count, remat=True
                    )
                    for count in (1, 8, 16, 17)
                ),
                *(
                    _theirs(f"its fsdp = 8 mesh, {count}", sequences=count, fsdp=8)
                    for count in (1, 2, 3)
                ),
                _theirs(
                    "gemma3-4b, fsdp = 8, remat repaired, 1",
                    model="gemma3_4b",
                    sequences=1,
                    fsdp=8,
                    remat=True,
                ),
            ),
        ),
    )
)
