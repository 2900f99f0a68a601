"""What a policy update minimises, token by token. Pure functions of log-probs.

All arrays are `rows seq`. A row may hold several rollouts behind one another, told apart by
`segments`; `learned` says which positions predict a token of a completion. Where nothing is learned
log-probs must be finite, and what comes out there has no meaning: `weighted_sum` passes over it.

    ratio       one a token (grpo, dr_grpo, dapo, cispo), or one a rollout (gspo)
    objective   clipped surrogate (all but cispo), or clipped weight times log-prob (cispo)
    times       the sampler's importance weight, where it is asked for
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
    """The mean over the learned tokens of each rollout, at each position of that rollout."""
    seq = values.shape[1]
    kept = jnp.where(learned, values, 0.0)

    def of_row(values: Float[Array, " seq"], segments: Int[Array, " seq"]) -> Float[Array, " seq"]:
        # Segments count from 1 and each has a position at least, so there are at most `seq`.
        return jax.ops.segment_sum(values, segments, num_segments=seq + 1)[segments]

    counts = jax.vmap(of_row)(learned.astype(values.dtype), segments)
    return jax.vmap(of_row)(kept, segments) / jnp.maximum(counts, 1.0)


def clipped_surrogate(
    log_ratio: PerToken, advantages: PerToken, *, low: float, high: float
) -> tuple[PerToken, PerToken]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), negated, and where clipping is active.

    With ratio r = exp(log_ratio) the loss is -min(r A, clip(r, 1 - low, 1 + high) A). At r = 1 its
    gradient is REINFORCE's.

        grpo      r of the token, low = high               arXiv:2402.03300, eq. 3
        dr_grpo   the same                                 arXiv:2503.20783, 3.2
        dapo      the same with low < high (clip-higher)   arXiv:2503.14476, 3.1
        gspo      r of the rollout, exp(mean over its tokens of log r); through it every token of
                  the rollout gets a gradient              arXiv:2507.18071, eqs. 5 to 7
    """
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - low, 1.0 + high)
    plain, bounded = ratio * advantages, clipped * advantages
    return -jnp.minimum(plain, bounded), (bounded < plain).astype(jnp.float32)


def clipped_weight(
    log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, *, low: float, high: float
) -> tuple[PerToken, PerToken]:
    """CISPO's objective (arXiv:2506.13585, eqs. 4 and 5), negated, and where its weight is clipped.

    The loss is -w A logprob, with w = clip(r, 1 - low, 1 + high) a constant for the gradient: where
    PPO's clipping drops a token, this one only bounds its weight. low = 1 is no lower bound.
    """
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    weight = jnp.clip(ratio, 1.0 - low, 1.0 + high)
    return -weight * advantages * logprobs, (weight != ratio).astype(jnp.float32)


def importance_weight(log_difference: PerToken, *, cap: float) -> PerToken:
    """Truncated importance weight min(exp(d), cap), a constant for the gradient.

    d is the log-prob that the learner gives the policy that drew, minus the one that the sampler
    recorded, under what it drew from: what the loss is multiplied by so that the sampler's rounding
    does not bias it, nor its truncation but for tokens that are never drawn, nor tokens of older
    versions in rollouts that were cut and continued.
    Truncation bounds the variance (Ionides 2008, "Truncated importance sampling"; for samplers and
    learners of language models Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training").
    """
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_difference), cap))


def kl_k1(logprobs: PerToken, reference: PerToken) -> PerToken:
    """The estimator k1 of KL(policy || reference), d = logprob - reference, with a gradient.

    Unbiased, of either sign (Schulman 2020, "Approximating KL divergence"). As a term of the loss
    the plain d would do nothing: the mean of its gradient, E[grad logprob], is 0 (Tang & Munos,
    arXiv:2506.09477, 3). The KL's own gradient is E[d grad logprob], which is what k1 has as part
    of a reward; so the value here is d and the gradient d times that of logprob.
    """
    difference = jax.lax.stop_gradient(logprobs - reference)
    return difference * (1.0 + logprobs - jax.lax.stop_gradient(logprobs))


def kl_k2(logprobs: PerToken, reference: PerToken) -> PerToken:
    """The estimator k2 of KL(policy || reference), d^2 / 2 with d = logprob - reference.

    Its value is biased, its gradient d grad logprob is not: it is the KL's, the same as k1's here
    (Schulman 2020; arXiv:2506.09477, 3).
    """
    return 0.5 * jnp.square(logprobs - reference)


def kl_k3(logprobs: PerToken, reference: PerToken) -> PerToken:
    """The estimator k3 of KL(policy || reference): r - 1 - log r with r = reference / policy.

    Unbiased and never negative (Schulman 2020; arXiv:2402.03300, eq. 4). Its gradient is the one
    that GRPO prescribes, (1 - r) grad logprob, whose mean is the gradient of the other divergence,
    KL(reference || policy) (arXiv:2506.09477, 3): equal to the KL's to first order in d only.
    """
    log_ratio = reference - logprobs
    return jnp.expm1(log_ratio) - log_ratio


SAMPLED_KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""Estimators of the KL from the sampled token alone, by the name in `learner.kl`.

Each is about the next token, given the tokens before it; that an update also changes which of those
come up is left out, as it is in GRPO.
"""


def weighted_sum(values: PerToken, weights: PerToken) -> Float[Array, ""]:
    """Sum over the tokens that count; what stands elsewhere, even NaN, has no effect."""
    return jnp.sum(jax.lax.select(weights > 0, values * weights, jnp.zeros_like(values)))
