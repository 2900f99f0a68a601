"""Tunix's gradient and decode programs, compiled for a v5e chip."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma3 import model as gemma3

from launch.bench import tunix_peer
from launch.bench.compiled import figures
from launch.bench.models import PROMPT, VOCAB, own_sizes
from launch.bench.tunix_sampler import TunixSampler
from pipeline.compute.aot.compile import VOCABULARY, DoesNotFitError, compile_for, v5e_devices
from pipeline.contracts.topology import GIB, HBM_GIB

BETA = 0.08
"""Weight of the KL term in Tunix's own recipes, with one reference log-prob a token."""

_CONFIGS = {
    "gemma3_1b": gemma3.ModelConfig.gemma3_1b_it,
    "gemma3_4b": gemma3.ModelConfig.gemma3_4b_it,
}


def gradient(
    *, model: str, sequences: int, length: int, fsdp: int = 1, remat: bool = False
) -> dict[str, Any]:
    """Returns figures of Tunix's GRPO loss and LoRA gradient on `sequences` of `length` tokens.

    Args:
        model: key of `MODELS`.
        sequences: on each chip.
        length: tokens of each sequence, prompt included.
        fsdp: chips over which base and batch are sharded; 1: every chip has the base.
        remat: use its remat, repaired.
    """
    mesh = tunix_peer.make_mesh(v5e_devices(fsdp))
    peer = tunix_peer.Peer.create(
        _CONFIGS[model](), rank=32, alpha=64.0, remat=remat, beta=BETA, mesh=mesh
    )
    lora, base = peer.placed()
    example = tunix_peer.abstract_example(
        sequences * fsdp, prompt=PROMPT, completion=length - PROMPT, mesh=mesh, reference=True
    )
    # Both moments of Adam have the LoRA's dtype, bfloat16.
    size = sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(lora))
    program = jax.jit(peer.gradient)
    found = figures(
        lambda: compile_for(program.trace(lora, base, example)),
        tokens=sequences * length,
        vocab=VOCAB,
        model=own_sizes(model),
        optimizer_bytes=2 * size,
    )
    return {"tokens": sequences * length, **found}


def sampler(*, model: str, sequences: int, length: int) -> dict[str, Any]:
    """Returns GiB of Tunix's decode program for a static batch.

    Args:
        model: key of `MODELS`.
        sequences: rows.
        length: positions of a prompt and its completion.
    """
    mesh = tunix_peer.make_mesh(v5e_devices(1))
    peer = tunix_peer.Peer.create(_CONFIGS[model](), rank=32, alpha=64.0, mesh=mesh)
    gemma = nnx.merge(peer.graphdef, *peer.placed())
    theirs = TunixSampler(gemma, VOCABULARY, prompt=PROMPT, new=length - PROMPT)
    try:
        program = compile_for(theirs.trace_decode(sequences, NamedSharding(mesh, PartitionSpec())))
    except DoesNotFitError as error:
        return {"fits": False, "needs_gib": error.needs_gib}
    gib = program.hbm_bytes / GIB
    return {"fits": gib <= HBM_GIB, "needs_gib": gib, "spare_gib": HBM_GIB - gib}
