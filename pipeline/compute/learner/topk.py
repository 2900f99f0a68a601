"""KL divergences over the k most likely tokens and one bucket for all others.

The signal of a reference or a teacher: k log-probs and token ids per position instead of one
number. Merging tokens into a bucket never increases a KL divergence (the log-sum inequality; Cover
and Thomas, "Elements of Information Theory", 2.7). So the result is a lower bound of the true
divergence, and equal to it when k is the vocabulary; log-probs stored in bfloat16 add a rounding
error of about 0.003 per token. Unlike the estimators in losses.py it does not depend on the sampled
token: its variance over samples is 0, and so is its gradient's.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pipeline.compute.learner.batches import TopKLogprobs
from pipeline.compute.model.top_k import TopK

Entries = Float[Array, "rows seq k"]
PerToken = Float[Array, "rows seq"]

_LEAST_MASS = 1e-7
"""Lower bound of masses: smaller ones are below float32's rounding of 1."""


def top_k_logprobs(top: TopK) -> TopKLogprobs:
    """The top k with the mass of all other tokens."""
    return TopKLogprobs(top.logprobs, top.tokens, jnp.log(_floored(_tail(top.logprobs))))


def reverse_kl(gathered: Entries, reference: TopKLogprobs) -> PerToken:
    """KL(policy || reference) over the reference's top k and the bucket of all others.

        sum_i p_i (log p_i - log q_i) + p_tail (log p_tail - log q_tail)

    Args:
        gathered: log-probs p of the reference's top tokens under the policy; differentiable.
        reference: q.
    """
    mass, tail = jnp.exp(gathered), _tail(gathered)
    inside = jnp.sum(mass * (gathered - reference.logprobs), axis=-1)
    return inside + tail * (jnp.log(_floored(tail)) - reference.tail)


def forward_kl(gathered: Entries, teacher: TopKLogprobs) -> PerToken:
    """KL(teacher || policy) over the teacher's top k and the bucket of all others.

        sum_i q_i (log q_i - log p_i) + q_tail (log q_tail - log p_tail)

    The objective of distillation (Hinton et al., arXiv:1503.02531): the policy covers the teacher.

    Args:
        gathered: log-probs p of the teacher's top tokens under the policy; differentiable.
        teacher: q.
    """
    inside = jnp.sum(jnp.exp(teacher.logprobs) * (teacher.logprobs - gathered), axis=-1)
    left = jnp.exp(teacher.tail)
    return inside + left * (teacher.tail - jnp.log(_floored(_tail(gathered))))


def gathered_mass(gathered: Entries) -> PerToken:
    """Mass that the policy gives to the gathered tokens."""
    return 1.0 - _tail(gathered)


def top_k_mass(top: TopKLogprobs) -> PerToken:
    """Mass that the reference or teacher itself gives to its top k."""
    return 1.0 - jnp.exp(top.tail)


def rank(top: TopKLogprobs, tokens: Int[Array, "rows seq"]) -> PerToken:
    """Rank of each token in the top k, from 0; k if it is not among them."""
    found = top.tokens == tokens[..., None]
    k = top.tokens.shape[-1]
    return jnp.where(found.any(-1), found.argmax(-1), k).astype(jnp.float32)


def _tail(logprobs: Entries) -> PerToken:
    """Mass of all other tokens, bounded below by 0 against rounding."""
    return jnp.maximum(1.0 - jnp.sum(jnp.exp(logprobs), axis=-1), 0.0)


def _floored(mass: PerToken) -> PerToken:
    return jnp.maximum(mass, _LEAST_MASS)
