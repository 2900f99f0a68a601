"""Scores of a few tokens at each position, from gathered rows of the embedding, and their gradient.

Rows are multiplied in their own dtype, with sums in float32; no copy of them in float32 exists.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pipeline.compute.model.head import Shard
from pipeline.compute.model.sharding import VOCAB_AXES

TokenIds = tuple[Array, ...]
"""Token ids, each `tokens` or `tokens k`; or values of the same shapes."""
_GATHERED = 4096
"""Rows of the embedding that are gathered at a time, so that they stay in fast memory."""


def gathered_scores(
    shard: Shard, hidden: Float[Array, "block embed"], tokens: TokenIds
) -> TokenIds:
    """Scores of `tokens`, each from the device that has its row of the embedding."""

    def one(position: tuple[Array, Array, Array]) -> Float[Array, " k"]:
        hidden, at, here = position
        logits = _product("pd,kd->pk", hidden, shard.embedding[at])
        return jnp.where(here, shard.head.score(logits), 0.0)

    found = tuple(
        _batched_map(one, hidden, *shard.local_rows(ids)).reshape(ids.shape) for ids in tokens
    )
    return jax.lax.psum(found, VOCAB_AXES)


def gathered_gradient(
    shard: Shard, grads: TokenIds, tokens: TokenIds
) -> Float[Array, "block embed"]:
    """This device's share of the gradient of the hidden states through the logits of `tokens`."""

    def one(position: tuple[Array, Array, Array]) -> Float[Array, " embed"]:
        grads, at, here = position
        return _product("pk,kd->pd", jnp.where(here, grads, 0.0), shard.embedding[at])

    found = (
        _batched_map(one, grad.reshape(len(grad), -1), *shard.local_rows(ids))
        for grad, ids in zip(grads, tokens, strict=True)
    )
    return jax.tree.reduce(jnp.add, tuple(found))


def _product(
    equation: str, x: Float[Array, " some"], rows: Shaped[Array, "k embed"]
) -> Float[Array, " others"]:
    """The product of a vector and rows; axis p of the equation holds the parts of `x`.

    In bfloat16 a float32 vector is the sum of its rounded value and a rest, so that little of it is
    lost. Two parts are also what a TPU multiplies in its matrix units; a single vector it would
    multiply by a copy of the rows in float32, in eight times the time.
    """
    exact = x.astype(jnp.float32)
    parts = [x.astype(rows.dtype)]
    if rows.dtype != jnp.float32:
        parts.append((exact - parts[0].astype(jnp.float32)).astype(rows.dtype))
    found = jnp.einsum(equation, jnp.stack(parts), rows, preferred_element_type=jnp.float32)
    return found.sum(axis=0)


def _batched_map(one: Callable[..., Array], *arrays: Array) -> Array:
    """Maps `one` over the positions of a block, in batches of about `_GATHERED` rows."""
    tokens, k = arrays[1].shape
    return jax.lax.map(one, arrays, batch_size=min(tokens, max(1, _GATHERED // k)))
