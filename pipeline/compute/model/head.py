"""From hidden states to log-probs: the only place that turns them into logits.

The distribution is the softmax over the vocabulary minus the forbidden tokens, of logits that are
capped if the model says so and divided by the temperature, the same for sampler and learner.

`score` walks over positions and vocabulary in blocks (head_blocks.py), forward and backward, with
sums in float32. The embedding is frozen: only the hidden states get a gradient, by a VJP of its own
that computes the logits again instead of keeping them. Positions may be sharded over the batch axes
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
from pipeline.compute.model.head_blocks import FORBIDDEN, Asked, Blocks, Found, backward, forward
from pipeline.compute.model.head_draw import draw as _draw
from pipeline.compute.model.sharding import BATCH_AXES, FSDP, VOCAB_AXES, platform
from pipeline.compute.model.truncation import Truncation

_TOP_K_BLOCKS = {"tpu": (1024, 2048), "cpu": (256, 32_768), "gpu": (256, 32_768)}
"""Blocks of positions and vocabulary where the likeliest tokens are wanted, by kind of device.
On a TPU larger ones take 140 MB for sorting; on a CPU smaller ones start too many sorts; for a GPU,
where none were measured, the CPU's."""


@dataclass(frozen=True)
class Head:
    """How hidden states become a distribution, and in which blocks.

    Attributes:
        softcap: bound of the logits; None: they have none.
        temperature: divides the logits.
        tokens: positions whose logits exist at a time, per device. Where the likeliest tokens are
            wanted, blocks have sizes of their own.
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
    """The likeliest tokens of a distribution; exact, and where scores tie the lower id first.

    Attributes:
        logprobs: descending, normalised over the whole vocabulary.
        tokens: their ids.
    """

    logprobs: Float[Array, "rows seq k"]
    tokens: Int[Array, "rows seq k"]


class Scores(NamedTuple):
    """What one pass over the vocabulary says of each position; all in float32.

    Attributes:
        logprobs: of the targets.
        log_z: log-sum-exp of the scores.
        entropy: in nats; no gradient flows through it.
        picked: log-probs of the tokens that were asked for; None: none were.
        top: the likeliest tokens, without a gradient; None: they were not asked for.
    """

    logprobs: Float[Array, "rows seq"]
    log_z: Float[Array, "rows seq"]
    entropy: Float[Array, "rows seq"]
    picked: Float[Array, "rows seq k"] | None
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
    picks: Int[Array, "rows seq k"] | None = None,
    top_k: int = 0,
) -> Scores:
    """Log-probs of targets, and what else is asked for, in one pass over the vocabulary.

    Log-probs of forbidden tokens are those of a token that could be drawn, so targets and picks
    should not be forbidden.

    Args:
        hidden: after the final norm.
        targets: one token for each position.
        embedding: tied, `vocab embed`; it gets no gradient.
        head: the distribution, and the blocks.
        forbidden: True where a token may not be drawn.
        picks: further tokens whose log-probs are wanted, differentiable like those of the targets.
        top_k: how many of the likeliest tokens are wanted.

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
    asked: tuple[Array, ...] = (targets,) if picks is None else (targets, picks)
    flat, *chosen = (x.reshape(rows * seq, *x.shape[2:]) for x in (hidden, *asked))
    found = _passes(blocks, head.mesh, embedding, forbidden, flat, tuple(chosen))
    log_z, entropy, (target, *picked), values, ids = jax.tree.map(
        lambda x: x.reshape(rows, seq, *x.shape[1:]), found
    )
    fixed = jax.lax.stop_gradient
    return Scores(
        logprobs=target - log_z,
        log_z=log_z,
        entropy=fixed(entropy),
        picked=picked[0] - log_z[..., None] if picked else None,
        top=TopK(fixed(values - log_z[..., None]), ids) if top_k else None,
    )


def draw(
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
    """One token a row, its log-prob, and its log-prob renormalised over what could be drawn.

    Without truncation that is the whole distribution, in one pass, and the log-probs are the same.

    Args:
        hidden: after the final norm.
        embedding: tied, `vocab embed`.
        head: the distribution but for its temperature, and the blocks.
        forbidden: True where a token may not be drawn.
        keys: each row's random key at this position, see `gumbel.keys_at`.
        temperature: divides the logits.
        noise: 1.0 draws (Gumbel-max), 0.0 takes the likeliest token.
        truncation: what cannot be drawn though it is not forbidden; None: nothing.
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
    return _on_devices(partial(_draw, blocks, truncation), head.mesh, embedding, forbidden, *given)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _passes(
    blocks: Blocks,
    mesh: Mesh,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    hidden: Float[Array, "tokens embed"],
    asked: Asked,
) -> Found:
    """`head_blocks.forward` on every device; log_z and the chosen scores have gradients."""
    return _on_devices(partial(forward, blocks), mesh, embedding, forbidden, hidden, asked)


def _passes_forward(blocks: Blocks, mesh: Mesh, *given: Any) -> tuple[Found, Any]:
    found = _passes(blocks, mesh, *given)
    log_z, _, chosen, *_ = found
    return found, (*given, log_z, chosen)


def _passes_backward(
    blocks: Blocks, mesh: Mesh, kept: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[None, None, Float[Array, "tokens embed"], None]:
    d_log_z, _, d_chosen, *_ = grads
    d_hidden = _on_devices(partial(backward, blocks), mesh, *kept, d_log_z, d_chosen)
    return None, None, d_hidden, None


_passes.defvjp(_passes_forward, _passes_backward)


def _on_devices(run: Callable[..., Any], mesh: Mesh, *arrays: Any) -> Any:
    """`run` on each device's share: the first two arrays by vocabulary, the others by position."""
    by_entry, by_position = PartitionSpec(VOCAB_AXES), PartitionSpec(BATCH_AXES)
    specs = (by_entry, by_entry, *(by_position for _ in arrays[2:]))
    # What is the same along tp is so because it was summed over it; not worth proving to JAX.
    local = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=by_position, check_vma=False)
    return local(*arrays)


def _devices(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
