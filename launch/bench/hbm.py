"""`python -m launch.bench hbm`: memory and time of the learner on a v5e chip, ours and Tunix's.

By the TPU compiler: the gradient of gemma3-1b with a LoRA of rank 32 on all matrices, in one
backward pass for all sequences. `launch.bench sizing` has the sampler's memory.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma3 import model as gemma3

from configs.schema import Config
from launch.bench.costs import figures, traced_figures
from launch.bench.harness import Bound, Figures, Row, Section
from launch.bench.shapes import COMPILER, config_of
from launch.bench.tunix import Peer, train_example
from pipeline.compute.aot.compile import v5e_devices
from pipeline.compute.model.sharding import make_mesh
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.memory import memory_beside

PROMPT, COMPLETION = 256, 768
"""Tokens of a sequence."""
BETA = 0.08
"""Weight of the KL term in Tunix's own recipes, with one reference log-prob a token."""


def ours(*, sequences: int) -> Figures:
    """Our gradient, and Adam's two float32 moments."""
    config, program = _config(sequences), f"gradient {sequences}"
    moments = memory_beside(config, shape_of(config), program)["optimizer"]
    return _by_token(figures(config, program, beside=moments), sequences)


def tunix(*, sequences: int) -> Figures:
    """Tunix's GRPO loss and gradient; Adam's moments have the LoRA's dtype, bfloat16."""
    place = NamedSharding(make_mesh(v5e_devices(1)), PartitionSpec())
    peer = Peer.create(gemma3.ModelConfig.gemma3_1b_it(), _config(sequences).lora)
    example = jax.eval_shape(
        train_example,
        jax.ShapeDtypeStruct((sequences, PROMPT), jnp.int32),
        jax.ShapeDtypeStruct((sequences, COMPLETION), jnp.int32),
        jax.ShapeDtypeStruct((sequences,), jnp.float32),
        jax.ShapeDtypeStruct((sequences, COMPLETION), jnp.float32),
    )
    given = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        (peer.lora, peer.base, example),
    )
    leaves = jax.tree.leaves(peer.lora)
    moments = 2 * sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
    traced = jax.jit(partial(peer.gradient, beta=BETA)).trace(*given)
    return _by_token(traced_figures(traced, beside=moments), sequences)


def _config(sequences: int) -> Config:
    sizes = {"slots": 16, "prompt": PROMPT, "new": COMPLETION}
    tokens = sequences * (PROMPT + COMPLETION)
    return config_of("gemma3-1b", device=COMPILER, **sizes, plan__micro_batch_tokens=tokens)


def _by_token(found: dict[str, Any], sequences: int) -> Figures:
    if found["fits"]:
        found["us_per_token"] = 1e3 * found["ms"] / (sequences * (PROMPT + COMPLETION))
    return found


def sections(_: argparse.Namespace) -> list[Section]:
    """Rows for small and large micro-batches, and for Tunix's largest that fits."""
    rows = [
        *(Row(f"{n} sequences", ours, {"sequences": n}, programs=1) for n in (1, 2, 8, 32, 128)),
        Row("Tunix, 8 sequences", tunix, {"sequences": 8}, programs=1),
    ]
    title = (
        f"GiB of a v5e chip's 15.75 for the gradient of sequences of {PROMPT} + {COMPLETION} "
        "tokens, Adam included; ours with topk KL, k = 64, each layer recomputed; Tunix's loss as "
        "it ships, base on every chip; milliseconds are the compiler's estimate"
    )
    return [Section("gradient", title, rows, [Bound("gib", most=12.0, rows="128 *")])]
