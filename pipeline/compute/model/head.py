"""From hidden states to log-probs: the only module that computes logits.

The distribution is the softmax over the vocabulary minus the forbidden tokens, of logits that are
soft-capped if the model does so and divided by the temperature; the same for sampler and learner.

`score` iterates over positions and vocabulary in blocks (head_blocks.py), forward and backward,
with sums in float32. The embedding is frozen: only the hidden states get a gradient, by a custom
VJP that recomputes the logits instead of storing them. Positions may be sharded over the batch axes
of a mesh and the vocabulary over fsdp and tp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from pipeline.compute.model.attention import soft_cap
from pipeline.compute.model.head_blocks import (
    FORBIDDEN,
    Blocks,
    Outputs,
    TokenIds,
    backward,
    forward,
)
from pipeline.compute.model.head_sample import sample as _sample
from pipeline.compute.model.sharding import BATCH_AXES, FSDP, VOCAB_AXES, platform
from pipeline.compute.model.truncation import Truncation

_TOP_K_BLOCKS = {"tpu": (1024, 2048), "cpu": (256, 32_768), "gpu": (256, 32_768)}
"""Blocks of positions and vocabulary for the top k, by kind of device. On a TPU larger blocks take
140 MB for sorting; on a CPU smaller ones start too many sorts; those of a GPU are not measured and
equal the CPU's."""


@dataclass(frozen=True)
class Head:
    """Distribution and block sizes.

    Attributes:
        softcap: bound of the logits; None: no soft cap.
        temperature: divides the logits.
        tokens: positions whose logits exist at a time, per device; the top k has its own blocks.
        vocab: entries of the vocabulary whose logits exist at a time, per device.
        mesh: devices; hidden states are sharded by row over its batch axes, the embedding over its
            vocabulary axes.
    """

    softcap: float | None
    temperature: float
    tokens: int
    vocab: int
    mesh: Mesh


class TopK(NamedTuple):
    """The k most likely tokens of a distribution; exact, ties in order of the token id.

    Attributes:
        logprobs: descending, normalised over the whole vocabulary.
        tokens: their ids.
    """

    logprobs: Float[Array, "rows seq k"]
    tokens: Int[Array, "rows seq k"]


class Scores(NamedTuple):
    """Results of one pass over the vocabulary for each position; all in float32.

    Attributes:
        logprobs: of the targets.
        log_z: log-sum-exp of the scores.
        entropy: in nats; no gradient flows through it.
        gathered: log-probs of `gather_tokens`; None without them.
        top: the k most likely tokens, without a gradient; None for top_k = 0.
    """

    logprobs: Float[Array, "rows seq"]
    log_z: Float[Array, "rows seq"]
    entropy: Float[Array, "rows seq"]
    gathered: Float[Array, "rows seq k"] | None
    top: TopK | None


def scaled_logits(
    hidden: Float[Array, "*rows embed"],
    embedding: Float[Array, "vocab embed"],
    *,
    softcap: float | None,
    temperature: Float[Array, ""] | float,
    forbidden: Bool[Array, " vocab"],
) -> Float[Array, "*rows vocab"]:
    """Float32 logits, capped and divided by the temperature, forbidden tokens at `FORBIDDEN`."""
    logits = jnp.einsum("...d,vd->...v", hidden, embedding, preferred_element_type=jnp.float32)
    return jnp.where(forbidden, FORBIDDEN, soft_cap(logits, softcap) / temperature)


def score(
    hidden: Float[Array, "rows seq embed"],
    targets: Int[Array, "rows seq"],
    embedding: Float[Array, "vocab embed"],
    *,
    head: Head,
    forbidden: Bool[Array, " vocab"],
    gather_tokens: Int[Array, "rows seq k"] | None = None,
    top_k: int = 0,
) -> Scores:
    """Log-probs of targets and of further tokens in one pass over the vocabulary.

    The log-prob of a forbidden token is computed as if it were allowed, so `targets` and
    `gather_tokens` should not be forbidden.

    Args:
        hidden: after the final norm.
        targets: one token for each position.
        embedding: tied, `vocab embed`; it gets no gradient.
        head: the distribution and the block sizes.
        forbidden: True for tokens that cannot be sampled.
        gather_tokens: further tokens whose log-probs are returned, differentiable like those of
            the targets.
        top_k: number of most likely tokens to return.

    Raises:
        ValueError: if a device has fewer than `top_k` entries of the vocabulary.
    """
    here = embedding.shape[0] // _devices(head.mesh, VOCAB_AXES)
    if top_k > here:
        raise ValueError(f"top_k = {top_k}, but a device has only {here} entries of the vocabulary")
    most_tokens, most_vocab = head.tokens, head.vocab
    if top_k:
        most_tokens, most_vocab = _TOP_K_BLOCKS[platform(head.mesh)]
    blocks = Blocks(
        softcap=head.softcap,
        temperature=head.temperature,
        tokens=most_tokens,
        vocab=most_vocab,
        top_k=top_k,
        shards=_devices(head.mesh, (FSDP,)),
    )
    rows, seq = targets.shape
    selected: TokenIds = (targets,) if gather_tokens is None else (targets, gather_tokens)
    flat, *tokens = (x.reshape(rows * seq, *x.shape[2:]) for x in (hidden, *selected))
    found = _passes(blocks, head.mesh, embedding, forbidden, flat, tuple(tokens))
    log_z, entropy, (target, *gathered), values, ids = jax.tree.map(
        lambda x: x.reshape(rows, seq, *x.shape[1:]), found
    )
    fixed = jax.lax.stop_gradient
    return Scores(
        logprobs=target - log_z,
        log_z=log_z,
        entropy=fixed(entropy),
        gathered=gathered[0] - log_z[..., None] if gathered else None,
        top=TopK(fixed(values - log_z[..., None]), ids) if top_k else None,
    )


def sample(
    hidden: Float[Array, "rows embed"],
    embedding: Float[Array, "vocab embed"],
    *,
    head: Head,
    forbidden: Bool[Array, " vocab"],
    keys: UInt32[Array, "rows 2"],
    temperature: Float[Array, ""],
    noise: Float[Array, ""],
    truncation: Truncation | None = None,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]]:
    """Samples one token per row; its log-prob under the full and under the truncated distribution.

    Without truncation both log-probs are the same and one pass over the vocabulary suffices.

    Args:
        hidden: after the final norm.
        embedding: tied, `vocab embed`.
        head: the distribution except its temperature, and the block sizes.
        forbidden: True for tokens that cannot be sampled.
        keys: RNG key of each row at this position, see `gumbel.keys_at`.
        temperature: divides the logits.
        noise: 1.0 samples (Gumbel-max), 0.0 takes the most likely token.
        truncation: top-k, top-p and min-p; None: no truncation.
    """
    blocks = Blocks(
        softcap=head.softcap,
        temperature=1.0,
        tokens=head.tokens,
        vocab=head.vocab,
        top_k=0,
        shards=_devices(head.mesh, (FSDP,)),
    )
    rows = jnp.ones(len(hidden), jnp.float32)
    given = hidden, keys, temperature * rows, noise * rows
    run = partial(_sample, blocks, truncation)
    return _on_devices(run, head.mesh, embedding, forbidden, *given)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _passes(
    blocks: Blocks,
    mesh: Mesh,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    hidden: Float[Array, "tokens embed"],
    tokens: TokenIds,
) -> Outputs:
    """`head_blocks.forward` on every device; log_z and the gathered scores have gradients."""
    return _on_devices(partial(forward, blocks), mesh, embedding, forbidden, hidden, tokens)


def _passes_forward(blocks: Blocks, mesh: Mesh, *given: Any) -> tuple[Outputs, Any]:
    found = _passes(blocks, mesh, *given)
    log_z, _, gathered, *_ = found
    return found, (*given, log_z, gathered)


def _passes_backward(
    blocks: Blocks, mesh: Mesh, residuals: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[None, None, Float[Array, "tokens embed"], None]:
    d_log_z, _, d_gathered, *_ = grads
    d_hidden = _on_devices(partial(backward, blocks), mesh, *residuals, d_log_z, d_gathered)
    return None, None, d_hidden, None


_passes.defvjp(_passes_forward, _passes_backward)


def _on_devices(run: Callable[..., Any], mesh: Mesh, *arrays: Any) -> Any:
    """`run` in `shard_map`: the first two arrays by vocabulary, the others by position."""
    by_entry, by_position = PartitionSpec(VOCAB_AXES), PartitionSpec(BATCH_AXES)
    specs = (by_entry, by_entry, *(by_position for _ in arrays[2:]))
    # Outputs are equal along tp because they are sums over it, which check_vma cannot infer.
    local = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=by_position, check_vma=False)
    return local(*arrays)


def _devices(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
