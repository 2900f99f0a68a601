"""Losses of a policy update per token. Pure functions of log-probs.

All arrays are `rows seq`. A row may hold several rollouts in sequence, distinguished by `segments`;
`learned` is True for positions that predict a token of a completion. Log-probs at other positions
must be finite; results there are undefined, and `weighted_sum` ignores them.

    ratio       per token (grpo, dr_grpo, dapo, cispo) or per rollout (gspo)
    objective   clipped surrogate (all but cispo), or clipped weight times log-prob (cispo)
    times       the sampler's importance weight, if configured
    plus        kl_coef x KL(policy || reference)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

PerToken = Float[Array, "rows seq"]


def rollout_mean(
    values: PerToken, *, segments: Int[Array, "rows seq"], learned: Bool[Array, "rows seq"]
) -> PerToken:
    """The mean over the learned tokens of each rollout, broadcast to its positions."""
    seq = values.shape[1]
    kept = jnp.where(learned, values, 0.0)

    def of_row(values: Float[Array, " seq"], segments: Int[Array, " seq"]) -> Float[Array, " seq"]:
        # Segments are numbered from 1 and have at least one position, so there are at most `seq`.
        return jax.ops.segment_sum(values, segments, num_segments=seq + 1)[segments]

    counts = jax.vmap(of_row)(learned.astype(values.dtype), segments)
    return jax.vmap(of_row)(kept, segments) / jnp.maximum(counts, 1.0)


def clipped_surrogate(
    log_ratio: PerToken, advantages: PerToken, *, low: float, high: float
) -> tuple[PerToken, PerToken]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), negated, and the clipped positions.

    With ratio r = exp(log_ratio) the loss is -min(r A, clip(r, 1 - low, 1 + high) A). At r = 1 its
    gradient is REINFORCE's.

        grpo      r of the token, low = high               arXiv:2402.03300, eq. 3
        dr_grpo   the same                                 arXiv:2503.20783, 3.2
        dapo      the same with low < high (clip-higher)   arXiv:2503.14476, 3.1
        gspo      r of the rollout, exp(mean over its tokens of log r), with a gradient for every
                  token of the rollout                     arXiv:2507.18071, eqs. 5 to 7
    """
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - low, 1.0 + high)
    plain, bounded = ratio * advantages, clipped * advantages
    return -jnp.minimum(plain, bounded), (bounded < plain).astype(jnp.float32)


def clipped_weight(
    log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, *, low: float, high: float
) -> tuple[PerToken, PerToken]:
    """CISPO's objective (arXiv:2506.13585, eqs. 4 and 5), negated, and the clipped positions.

    The loss is -w A logprob, with w = clip(r, 1 - low, 1 + high) constant for the gradient: PPO's
    clipping drops a token, CISPO only bounds its weight. low = 1 means no lower bound.
    """
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    weight = jnp.clip(ratio, 1.0 - low, 1.0 + high)
    return -weight * advantages * logprobs, (weight != ratio).astype(jnp.float32)


def importance_weight(log_difference: PerToken, *, cap: float) -> PerToken:
    """Truncated importance weight min(exp(d), cap), constant for the gradient.

    d is the learner's old log-prob minus the sampler's processed log-prob. The weight corrects the
    bias of the sampler's rounding, of its truncated distribution (except for tokens that are never
    sampled), and of tokens that older versions sampled in continued rollouts.
    Truncation of the weight bounds the variance (Ionides 2008, "Truncated importance sampling"; for
    samplers and learners of language models Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training").
    """
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_difference), cap))


def kl_k1(logprobs: PerToken, reference: PerToken) -> PerToken:
    """The estimator k1 of KL(policy || reference), d = logprob - reference, with a gradient.

    Unbiased, of either sign (Schulman 2020, "Approximating KL divergence"). As a loss term plain d
    has no effect: the mean of its gradient, E[grad logprob], is 0 (Tang & Munos, arXiv:2506.09477,
    3). The KL's gradient is E[d grad logprob], which k1 has as part of a reward; so the value here
    is d and the gradient d times that of logprob.
    """
    difference = jax.lax.stop_gradient(logprobs - reference)
    return difference * (1.0 + logprobs - jax.lax.stop_gradient(logprobs))


def kl_k2(logprobs: PerToken, reference: PerToken) -> PerToken:
    """The estimator k2 of KL(policy || reference), d^2 / 2 with d = logprob - reference.

    Its value is biased; its gradient, d grad logprob, is the KL's gradient, the same as that of
    `kl_k1` (Schulman 2020; arXiv:2506.09477, 3).
    """
    return 0.5 * jnp.square(logprobs - reference)


def kl_k3(logprobs: PerToken, reference: PerToken) -> PerToken:
    """The estimator k3 of KL(policy || reference): r - 1 - log r with r = reference / policy.

    Unbiased and never negative (Schulman 2020; arXiv:2402.03300, eq. 4). Its gradient is GRPO's,
    (1 - r) grad logprob, whose mean is the gradient of the reverse divergence
    KL(reference || policy) (arXiv:2506.09477, 3): equal to the KL's to first order in d only.
    """
    log_ratio = reference - logprobs
    return jnp.expm1(log_ratio) - log_ratio


SAMPLED_KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""Estimators of the KL from the sampled token alone, by name in `learner.kl`.

Each is conditional on the tokens before; the effect of an update on the distribution of those is
ignored, as in GRPO.
"""


def weighted_sum(values: PerToken, weights: PerToken) -> Float[Array, ""]:
    """Sum over the tokens with positive weight; values elsewhere, even NaN, have no effect."""
    return jnp.sum(jax.lax.select(weights > 0, values * weights, jnp.zeros_like(values)))


def learned_max(values: PerToken, weights: PerToken) -> Float[Array, ""]:
    """The largest of the values >= 0 of the tokens with positive weight; 0 without any."""
    return jnp.max(jnp.where(weights > 0, values, 0.0))
