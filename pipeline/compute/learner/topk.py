"""A distribution kept as its k likeliest tokens and one bucket for all others.

The signal of a reference or a teacher: k log-probs and indices a position instead of one number.
Merging tokens into a bucket never increases a KL divergence (the log-sum inequality; Cover and
Thomas, "Elements of Information Theory", 2.7). So what is computed from it is a lower bound
of the true one, and equal to it when k is the vocabulary; of what is kept in bfloat16 only but for
rounding, some 0.003 a token. Unlike the estimators in losses.py it does not depend on which token
was drawn: its variance over draws is 0, and so is its gradient's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pipeline.compute.learner.batches import Kept
from pipeline.compute.model.head import TopK

Entries = Float[Array, "rows seq k"]
PerToken = Float[Array, "rows seq"]

_LEAST_MASS = 1e-7
"""Masses below this, float32's rounding of 1, are not told from 0: its logarithm stands for all."""


def keep(top: TopK, *, dtype: jax.typing.DTypeLike) -> Kept:
    """What is kept of a distribution; `dtype` is that of the log-probs."""
    return Kept(top.logprobs.astype(dtype), top.tokens, jnp.log(_floored(_tail(top.logprobs))))


def reverse_kl(picked: Entries, reference: Kept) -> PerToken:
    """KL(policy || reference) over the reference's top k and the bucket of all others.

        sum_i p_i (log p_i - log q_i) + p_tail (log p_tail - log q_tail)

    Args:
        picked: log-probs p of the reference's top tokens under the policy; differentiable.
        reference: q.
    """
    mass, tail = jnp.exp(picked), _tail(picked)
    inside = jnp.sum(mass * (picked - _logprobs(reference)), axis=-1)
    return inside + tail * (jnp.log(_floored(tail)) - reference.tail)


def forward_kl(picked: Entries, teacher: Kept) -> PerToken:
    """KL(teacher || policy) over the teacher's top k and the bucket of all others.

        sum_i q_i (log q_i - log p_i) + q_tail (log q_tail - log p_tail)

    What distillation minimises (Hinton et al., arXiv:1503.02531): the policy covers the teacher.

    Args:
        picked: log-probs p of the teacher's top tokens under the policy; differentiable.
        teacher: q.
    """
    logprobs = _logprobs(teacher)
    inside = jnp.sum(jnp.exp(logprobs) * (logprobs - picked), axis=-1)
    left = jnp.exp(teacher.tail)
    return inside + left * (teacher.tail - jnp.log(_floored(_tail(picked))))


def top_mass(picked: Entries) -> PerToken:
    """Mass that a policy gives to the kept tokens."""
    return 1.0 - _tail(picked)


def kept_mass(kept: Kept) -> PerToken:
    """Mass of the kept tokens where they were kept."""
    return 1.0 - jnp.exp(kept.tail)


def rank(kept: Kept, tokens: Int[Array, "rows seq"]) -> PerToken:
    """Place of each token among the kept ones, from 0; k where it is not among them."""
    found = kept.tokens == tokens[..., None]
    k = kept.tokens.shape[-1]
    return jnp.where(found.any(-1), found.argmax(-1), k).astype(jnp.float32)


def _logprobs(kept: Kept) -> Entries:
    return kept.logprobs.astype(jnp.float32)


def _tail(logprobs: Entries) -> PerToken:
    """Mass of the tokens that are not listed; rounding may not make it negative."""
    return jnp.maximum(1.0 - jnp.sum(jnp.exp(logprobs), axis=-1), 0.0)


def _floored(mass: PerToken) -> PerToken:
    return jnp.maximum(mass, _LEAST_MASS)
