"""What GRPO minimises, token by token. Pure functions of log-probs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def clipped_policy_loss(
    logprobs: Float[Array, "batch seq"],
    old_logprobs: Float[Array, "batch seq"],
    advantages: Float[Array, " batch"],
    *,
    epsilon: float,
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), negated, and where clipping is active.

    With ratio r = exp(logprob - old) the loss is -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A).
    At r = 1 its gradient is REINFORCE's.
    """
    ratio = jnp.exp(logprobs - old_logprobs)
    clipped = jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon)
    plain, bounded = ratio * advantages[:, None], clipped * advantages[:, None]
    return -jnp.minimum(plain, bounded), (bounded < plain).astype(jnp.float32)


def kl_k3(
    logprobs: Float[Array, "batch seq"], reference: Float[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """The estimator k3 of KL(policy || reference): r - 1 - log r with r = reference / policy.

    Unbiased and never negative (Schulman 2020, "Approximating KL divergence"; arXiv:2402.03300,
    eq. 4).
    """
    log_ratio = reference - logprobs
    return jnp.expm1(log_ratio) - log_ratio


def weighted_sum(
    values: Float[Array, "batch seq"], weights: Float[Array, "batch seq"]
) -> Float[Array, ""]:
    """Sum over the tokens that count; what stands elsewhere, even NaN, has no effect."""
    return jnp.sum(jax.lax.select(weights > 0, values * weights, jnp.zeros_like(values)))
