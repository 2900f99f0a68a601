"""`python -m launch.bench hbm`: memory and time of the learner on a v5e chip, ours and Tunix's.

By the TPU compiler: the gradient program of gemma3-1b with a LoRA of rank 32 on all matrices, one
backward pass for all sequences; Tunix's GRPO loss and gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma3 import model as gemma3

from launch.bench.harness import Benchmark, Bound, Claim, Figures, Row, Section
from launch.bench.small_gemma import preset
from launch.bench.tunix import Peer, on, train_example
from launch.bench.v5e import PROMPT, figures, planned, traced_figures, v5e_config, v5e_preset
from pipeline.compute.aot.compile import v5e_devices
from pipeline.compute.model.sharding import make_mesh
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.memory import memory_beside
from pipeline.plan.topology import TPU_COMPILER

LENGTH = 1024
"""Tokens of a sequence, 256 of the prompt among them."""
MOST, MOST_GIB = "128", 12.0
"""Sequences whose gradient must fit into this part of a chip; the rest is for the sampler."""
NEAR_BEST = 1.03
"""A micro-batch is large enough if its time a token is at most this multiple of the best."""
BETA = 0.08
"""Weight of the KL term in Tunix's own recipes, with one reference log-prob a token."""


def ours(*, sequences: int) -> dict[str, Any]:
    """Returns figures of the learner's gradient on `sequences` of `LENGTH` tokens.

    Adam's moments, two float32 values per adapter parameter, are added to the memory.
    """
    config = v5e_config("gemma3_1b", length=LENGTH, plan__micro_batch_tokens=sequences * LENGTH)
    program = f"gradient {sequences}"
    moments = memory_beside(config, shape_of(config), program)["optimizer"]
    return _by_token(figures(config, program, beside=moments), sequences * LENGTH)


def theirs(*, sequences: int, remat: bool = False) -> dict[str, Any]:
    """Returns figures of Tunix's GRPO loss and LoRA gradient, base and batch on one chip.

    Args:
        sequences: of `LENGTH` tokens.
        remat: use its remat, repaired.
    """
    place = NamedSharding(make_mesh(v5e_devices(1)), PartitionSpec())
    config = v5e_config("gemma3_1b", length=LENGTH)
    peer = Peer.create(gemma3.ModelConfig.gemma3_1b_it(), config.lora, remat=remat, beta=BETA)
    completions = jax.ShapeDtypeStruct((sequences, LENGTH - PROMPT), jnp.int32)
    example = jax.eval_shape(
        train_example,
        jax.ShapeDtypeStruct((sequences, PROMPT), jnp.int32),
        completions,
        jax.ShapeDtypeStruct((sequences,), jnp.float32),
        jax.ShapeDtypeStruct(completions.shape, jnp.float32),
    )
    traced = jax.jit(peer.gradient).trace(
        on(place, peer.lora), on(place, peer.base), on(place, example)
    )
    # Both moments of Adam have the LoRA's dtype, bfloat16.
    leaves = jax.tree.leaves(peer.lora)
    moments = 2 * sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
    return _by_token(traced_figures(traced, beside=moments), sequences * LENGTH)


def _by_token(found: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Adds the estimated microseconds a token; absent if the program does not fit."""
    return found | ({"us_per_token": 1e3 * found["ms"] / tokens} if found["fits"] else {})


def the_preset_is_the_smallest_good_one(found: Mapping[str, Figures]) -> Iterator[Claim]:
    """Claims that the preset's micro-batch is the smallest near the best time a token."""
    times = {name: row["us_per_token"] for name, row in found.items() if "us_per_token" in row}
    if len(times) > 1:
        best = min(times.values())
        name = next(name for name, us in times.items() if us <= NEAR_BEST * best)
        config = planned(preset(v5e_preset("gemma3_1b")))
        rows = config.micro_batch_rows // config.plan.learner_devices
        sequences = str(rows * config.row_tokens // LENGTH)
        yield Claim(
            f"the smallest micro-batch within 3% of the best time a token ({best:.2f} µs) is the "
            f"preset's of {sequences}: {name} sequences, {times[name]:.2f} µs",
            name == sequences,
        )


BENCHMARK = Benchmark(
    (
        Section(
            "gradient",
            "Ours, gemma3-1b, LoRA of rank 32 on all matrices, topk KL with k = 64, sequences of "
            "256 + 768 tokens on one v5e chip: one backward for all of them; Adam included",
            [Row(str(count), ours, {"sequences": count}) for count in (1, 2, 4, 8, 16, 128, 160)],
            (Bound("gib", most=MOST_GIB, rows=MOST), the_preset_is_the_smallest_good_one),
        ),
        Section(
            "tunix",
            "Tunix 0.1.7's GRPO loss, the same model, LoRA and lengths, base on every chip",
            [
                Row("base on every chip, 8", theirs, {"sequences": 8}),
                Row(
                    "base on every chip, remat repaired, 16",
                    theirs,
                    {"sequences": 16, "remat": True},
                ),
            ],
            environment=TPU_COMPILER,
        ),
    ),
    needs_compiler=True,
)
