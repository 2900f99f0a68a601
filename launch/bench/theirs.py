"""Tunix's gradient program, compiled for a v5e chip."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from tunix.models.gemma3 import model as gemma3

from launch.bench import tunix_peer
from launch.bench.compiled import compile_for, figures, v5e_devices
from launch.bench.models import VOCAB, own_sizes
from launch.bench.ours import PROMPT

BETA = 0.08
"""Weight of the KL term in Tunix's own recipes; its reference is one log-prob a token."""

_CONFIGS = {
    "gemma3_1b": gemma3.ModelConfig.gemma3_1b_it,
    "gemma3_4b": gemma3.ModelConfig.gemma3_4b_it,
}


def gradient(
    *, model: str, sequences: int, length: int, fsdp: int = 1, remat: bool = False
) -> dict[str, Any]:
    """Figures of Tunix's GRPO loss and its LoRA gradient on `sequences` of `length` tokens a chip.

    Args:
        model: which Gemma 3.
        sequences: of each chip.
        length: tokens of each, prompt included.
        fsdp: chips over which base and batch are sharded; 1: every chip has the base.
        remat: with its remat, repaired.
    """
    mesh = tunix_peer.make_mesh(v5e_devices(fsdp))
    peer = tunix_peer.Peer.create(
        _CONFIGS[model](), rank=32, alpha=64.0, remat=remat, beta=BETA, mesh=mesh
    )
    lora, base = peer.placed()
    example = tunix_peer.abstract_example(
        sequences * fsdp, prompt=PROMPT, completion=length - PROMPT, mesh=mesh, reference=True
    )
    # Both moments of Adam are in the type of the LoRA, bfloat16.
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
