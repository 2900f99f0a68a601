"""`python -m launch.bench sweep`: speed and memory of rollouts by number of slots.

For a v5e chip by the TPU compiler; for a small model measured on this machine, as a run measures
its sizes: segments with all slots busy, each at half of its positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from launch.bench.harness import Benchmark, Claim, Figures, Row, Section
from launch.bench.rollout import LENGTH, decoding
from launch.bench.small_gemma import NEW, PROMPT, VOCABULARY, small_config, small_policy
from launch.bench.sweep_plot import write_plot
from launch.bench.v5e import figures, v5e_config
from pipeline.compute.decode.engine import Engine
from pipeline.compute.decode.rollout_weights import RolloutWeights
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.memory import memory_beside
from pipeline.plan.topology import GIB

_TOP_K = "top k of 64"
_NO_SLOWER = 0.9
"""Smallest allowed ratio of tokens a second when a few slots are added."""


def estimated(*, slots: int, length: int = LENGTH, **settings: Any) -> dict[str, Any]:
    """Returns figures of decoding with gemma3-1b on one v5e chip, by the TPU compiler.

    Args:
        slots: rollouts decoded at once.
        length: positions of a prompt and its completion.
        settings: further settings, `table__key=value`.

    Returns:
        GiB of the program and of the learner's matrices, if the sampler has its own copy of them;
        and the figures of `rollout.decoding`.
    """
    config = v5e_config("gemma3_1b", length=length, plan__slots=slots, **settings)
    program = f"segment {slots}"
    copied = memory_beside(config, shape_of(config), program)["base"]
    found = figures(config, program, beside=copied)
    about = {"slots": slots, "fits": found["fits"], "gib": found["gib"], "copied_gib": copied / GIB}
    return about | decoding(config, found["ms"])


def measured(
    *, slots: int, length: int = PROMPT + NEW, accelerator: bool = False, **settings: Any
) -> dict[str, Any]:
    """Returns figures of decoding with the small model on the device that JAX finds.

    Args:
        slots: rollouts decoded at once.
        length: positions of a prompt and its completion.
        accelerator: the figures are absent if JAX finds a CPU only.
        settings: further settings, `table__key=value`.

    Returns:
        MiB of the segment beside weights, milliseconds of a decode step and tokens a second.
    """
    platform = jax.default_backend()
    if accelerator and platform == "cpu":
        return {"absent": "JAX finds a CPU only"}
    config = small_config(
        rollout__max_new_tokens=length - PROMPT,
        plan__platform=platform,
        plan__slots=slots,
        plan__slot_buckets=[],
        plan__row_tokens=length,
        plan__micro_batch_tokens=length,
        **settings,
    )
    policy, base, adapter = small_policy(config)
    weights = RolloutWeights(policy, base, config)
    weights.load(adapter)
    engine = Engine(weights.policy, weights.base, config, VOCABULARY)
    times = engine.times(weights.base, weights.adapter)
    step_s = times.segment_s[slots] / config.segment_steps
    return {
        "slots": slots,
        "device": jax.devices()[0].device_kind,
        "mib": engine.needs[f"segment {slots}"] / 2**20,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": slots / step_s,
    }


def no_slow_spot(found: Mapping[str, Figures]) -> Iterator[Claim]:
    """Claims that a few more slots than 64 and 128 are not slower, with top-k sampling."""
    by_slots = {row.get("slots"): row.get("tokens_per_s", 0.0) for row in found.values()}
    for slots, more in ((64, 72), (128, 136)):
        if slots in by_slots or more in by_slots:
            before = by_slots.get(slots, 0.0)
            share = by_slots.get(more, 0.0) / before if before else 0.0
            what = f"{more} slots give {share:.2f} of the tokens/s of {slots} ({_NO_SLOWER})"
            yield Claim(f"no slow spot: {what}", share >= _NO_SLOWER)


def _estimated(series: str, *slots: int, **settings: Any) -> list[Row]:
    return [Row(_name(series, n), estimated, {"slots": n, **settings}) for n in slots]


def _measured(**settings: Any) -> list[Row]:
    """Rows of all series and slots."""
    series: dict[str, dict[str, Any]] = {
        "LoRA": {},
        "merged": {"plan__rollout_weights": "merged"},
        _TOP_K: {"rollout__top_k": 64},
        "int8 KV": {"plan__kv_cache": "int8"},
        "128 positions": {"length": 128},
        "1,280 positions": {"length": 1280},
    }
    return [
        Row(_name(name, slots), measured, {"slots": slots, **own, **settings})
        for name, own in series.items()
        for slots in (1, 2, 4, 8, 16, 32, 64)
    ]


def _name(series: str, slots: int) -> str:
    return f"{series}, {slots} slot{'s' if slots > 1 else ''}"


_V5E = "gemma3-1b, LoRA of rank 32 on all matrices, one v5e chip, by the TPU compiler"
_SMALL = (
    "a Gemma 3 of seven layers, width 128, window 64 and 512 entries, float32, LoRA of rank 16, "
    f"{PROMPT + NEW} positions unless a row says otherwise; every slot busy at half of its "
    "positions, the fastest of 5 warm segments of 8 steps"
)
# Rounded weights require importance_cap, which the sampler does not use.
_CAP = {"learner__importance_cap": 2.0}

BENCHMARK = Benchmark(
    (
        Section(
            "v5e slots",
            f"{_V5E}: sequences of {LENGTH:,} positions",
            _estimated("LoRA", 1, 8, 32, 64, 96, 128, 256, 512, 768),
        ),
        Section(
            "v5e weights",
            f"{_V5E}: plan.rollout_weights and plan.kv_cache; where the sampler runs a copy of the "
            "learner's matrices, these are on the chip, too",
            [
                *(
                    row
                    for kind in ("merged", "int8", "int8_matmul")
                    for row in _estimated(kind, 64, 512, plan__rollout_weights=kind, **_CAP)
                ),
                *_estimated("int8 KV", 64, 512, plan__kv_cache="int8"),
            ],
        ),
        Section(
            "v5e top-k",
            f"{_V5E}: rollout.top_k = 64",
            _estimated(_TOP_K, 64, 72, 128, 136, 256, rollout__top_k=64),
            (no_slow_spot,),
        ),
        Section(
            "v5e lengths",
            f"{_V5E}: shorter and longer sequences",
            [
                *_estimated("512 positions", 64, 256, length=512),
                *_estimated("4,096 positions", 64, 256, length=4096),
            ],
        ),
        Section("cpu", f"Measured on this machine's CPU: {_SMALL}", _measured()),
        Section(
            "accelerator",
            f"Measured on the accelerator that JAX finds here: {_SMALL}",
            _measured(accelerator=True),
            # JAX chooses the platform, independent of this process's environment.
            environment={"JAX_PLATFORMS": ""},
        ),
    ),
    plot=write_plot,
)
