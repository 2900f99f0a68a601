"""`python -m launch.bench hbm`: memory and time of sampler and learner on a v5e chip, and Tunix's.

By the TPU compiler, gemma3-1b unless a row says otherwise, with a LoRA of rank 32 on all matrices.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma3 import model as gemma3

from configs.schema import Config
from launch.bench.harness import Benchmark, Bound, Figures, Row, Section
from launch.bench.tunix import Peer, on, train_example
from launch.bench.v5e import figures, traced_figures, v5e_config
from pipeline.compute.aot.compile import VOCABULARY, v5e_devices
from pipeline.compute.model.sharding import make_mesh
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.memory import memory_beside
from pipeline.plan.topology import HBM_GIB

PROMPT = 256
"""Tokens of a prompt."""
DECODED, LEARNED = 1312, 1024
"""Positions of a prompt and its completion, in the sampler and in the learner."""
BETA = 0.08
"""Weight of the KL term in Tunix's own recipes, with one reference log-prob a token."""


def sampler(*, slots: int, model: str = "gemma3_1b", devices: int = 1, **settings: Any) -> Figures:
    """A decode segment of all slots.

    Args:
        slots: of a chip.
        model: of which the v5e-8 preset is used.
        devices: chips.
        settings: further settings, `table__key=value`.
    """
    new = DECODED - PROMPT
    config = v5e_config(
        model, slots=slots * devices, prompt=PROMPT, new=new, devices=devices, **settings
    )
    found = figures(config, f"segment {config.slots}")
    if not found["fits"]:
        return found
    step_ms = found["ms"] / config.segment_steps
    return {**found, "step_ms": step_ms, "tokens_per_s": 1e3 * slots / step_ms}


def learner(*, sequences: int) -> Figures:
    """The gradient of `sequences` rows in one pass, Adam's moments included."""
    config = _learner_config(plan__micro_batch_tokens=sequences * LEARNED)
    program = f"gradient {sequences}"
    moments = memory_beside(config, shape_of(config), program)["optimizer"]
    return _by_token(figures(config, program, beside=moments), sequences)


def tunix_sampler(*, rows: int) -> Figures:
    """Tunix's decode program for a static batch; its loop has no known number of steps."""
    place, peer = _tunix()
    weights = on(place, peer.lora), on(place, peer.base)
    decoder = peer.sampler(weights, VOCABULARY, prompt=PROMPT, new=DECODED - PROMPT)
    return traced_figures(decoder.trace_decode(rows, place), timed=False)


def tunix_learner(*, sequences: int) -> Figures:
    """Tunix's GRPO loss and LoRA gradient; both moments of Adam have the LoRA's dtype, bfloat16."""
    place, peer = _tunix()
    completions = jax.ShapeDtypeStruct((sequences, LEARNED - PROMPT), jnp.int32)
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
    leaves = jax.tree.leaves(peer.lora)
    moments = 2 * sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
    return _by_token(traced_figures(traced, beside=moments), sequences)


def _learner_config(**changes: Any) -> Config:
    return v5e_config("gemma3_1b", slots=16, prompt=PROMPT, new=LEARNED - PROMPT, **changes)


def _tunix() -> tuple[NamedSharding, Peer]:
    config = gemma3.ModelConfig.gemma3_1b_it()
    peer = Peer.create(config, _learner_config().lora, beta=BETA)
    return NamedSharding(make_mesh(v5e_devices(1)), PartitionSpec()), peer


def _by_token(found: dict[str, Any], sequences: int) -> Figures:
    if not found["fits"]:
        return found
    return {**found, "us_per_token": 1e3 * found["ms"] / (sequences * LEARNED)}


def benchmark(request: argparse.Namespace) -> Benchmark:
    """Rows for both samplers, and for both learners."""
    del request
    int8 = {"slots": 768, "plan__kv_cache": "int8"}
    large = {"slots": 32, "model": "gemma3_4b", "devices": 8}

    def row(name: str, measure: Any, **arguments: Any) -> Row:
        return Row(name, measure, arguments, programs=1)

    samplers = Section(
        "sampler",
        f"GiB of a v5e chip's {HBM_GIB} while decoding, {DECODED:,} positions a slot, noise and "
        "log-probs included; milliseconds are the compiler's estimate",
        [
            row("512 slots", sampler, slots=512),
            row("768 slots, int8 caches", sampler, **int8),
            row("gemma3-4b on 8 chips, 32 slots each", sampler, **large),
            row("Tunix, 384 rows", tunix_sampler, rows=384),
        ],
        [Bound("gib", most=HBM_GIB - 4, rows="512 slots")],
    )
    learners = Section(
        "learner",
        f"The gradient of sequences of {PROMPT} + {LEARNED - PROMPT} tokens in one pass, Adam "
        "included: ours with topk KL, k = 64, each layer recomputed; Tunix's GRPO loss as it ships",
        [
            *(row(f"{n} sequences", learner, sequences=n) for n in (2, 16, 128)),
            row("Tunix, 8 sequences", tunix_learner, sequences=8),
        ],
        [Bound("gib", most=12.0, rows="128 sequences")],
    )
    return Benchmark([samplers, learners])
