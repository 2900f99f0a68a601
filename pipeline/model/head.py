"""From hidden states to log-probs: the only place that turns them into logits.

The distribution is the softmax over the vocabulary minus the forbidden tokens, of logits that are
capped if the model says so and divided by the temperature, the same for sampler and learner. Logits
exist for a few positions at a time and are computed again
in the backward pass; the embedding is frozen, so only the hidden states get a gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pipeline.model.attention import soft_cap

FORBIDDEN = -1e30
"""Score of a token that may not be drawn; finite, so that no gradient becomes NaN."""


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


def token_logprobs(
    hidden: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    embedding: Float[Array, "vocab embed"],
    *,
    softcap: float | None,
    temperature: float,
    forbidden: Bool[Array, " vocab"],
    positions_at_once: int,
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Log-prob of each target, and the entropy in nats of the distribution it was drawn from.

    Walks over the sequence axis in blocks, so that at most `batch x positions_at_once x vocab`
    logits exist at a time, in the forward and in the backward pass. No gradient flows through the
    entropy.
    """
    batch, seq, embed = hidden.shape
    block = min(positions_at_once, seq)
    count = -(-seq // block)
    padded = count * block - seq
    hidden = jnp.pad(hidden, ((0, 0), (0, padded), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padded)))

    @jax.checkpoint
    def one_block(
        hidden: Float[Array, "batch block embed"], targets: Int[Array, "batch block"]
    ) -> tuple[Float[Array, "batch block"], Float[Array, "batch block"]]:
        scores = scaled_logits(
            hidden, embedding, softcap=softcap, temperature=temperature, forbidden=forbidden
        )
        log_z = jax.nn.logsumexp(scores, axis=-1)
        picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
        frozen = jax.lax.stop_gradient(scores - log_z[..., None])
        entropy = -jnp.sum(jnp.exp(frozen) * jnp.where(forbidden, 0.0, frozen), axis=-1)
        return picked - log_z, entropy

    def step(
        carry: None, xs: tuple[Float[Array, "batch block embed"], Int[Array, "batch block"]]
    ) -> tuple[None, tuple[Float[Array, "batch block"], Float[Array, "batch block"]]]:
        return carry, one_block(*xs)

    blocks = (
        jnp.moveaxis(hidden.reshape(batch, count, block, embed), 1, 0),
        jnp.moveaxis(targets.reshape(batch, count, block), 1, 0),
    )
    _, (logprobs, entropy) = jax.lax.scan(step, None, blocks)

    def whole(x: Float[Array, "count batch block"]) -> Float[Array, "batch seq"]:
        return jnp.moveaxis(x, 0, 1).reshape(batch, count * block)[:, :seq]

    return whole(logprobs), whole(entropy)
