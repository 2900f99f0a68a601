"""The loss of a policy update per token: losses.py combined according to the settings.

Its metrics, weighted means over learned tokens if nothing else is said (`programs.combined`):

    policy_loss                     sum of the policy loss
    entropy                         of the next token's distribution, in nats
    ratio_mean, ratio_max           probability of current to old policy, of a token or (gspo) of a
                                    rollout; 1 if each batch is used once
    clip_fraction                   clipped positions, as the losses define them
    clip_low, clip_high             those with a ratio below and above 1
    importance_weight               with importance_cap: the weight
    importance_capped               share of the weights at the cap
    kl                              with kl_coef > 0; otherwise no reference is computed, and KL is
                                    not known
    top_mass_reference, _policy     with kl = "topk": mass of the reference's top k tokens
    sampled_rank, sampled_outside   rank of the sampled token among them, share outside
    distillation                    with a teacher
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from configs.learner import Learner
from pipeline.compute.learner import topk
from pipeline.compute.learner.batches import DeviceBatch, TopKLogprobs
from pipeline.compute.learner.losses import (
    SAMPLED_KL,
    clipped_surrogate,
    clipped_weight,
    importance_weight,
    rollout_mean,
)
from pipeline.compute.model.head_score import Scores

PerToken = Float[Array, "rows seq"]


def gather_tokens(batch: DeviceBatch) -> Int[Array, "rows seq k"] | None:
    """The top-k tokens of reference and teacher, whose log-probs the objective needs."""
    tokens = [top.tokens for top in (batch.reference, batch.teacher) if top is not None]
    return jnp.concatenate(tokens, axis=-1) if tokens else None


def objective(
    scores: Scores, batch: DeviceBatch, *, settings: Learner
) -> tuple[PerToken, dict[str, PerToken]]:
    """The loss of each token, and its metrics; positions that are not learned are undefined.

    Args:
        scores: of the current policy; `gathered` are the tokens of `gather_tokens`.
        batch: the micro-batch.
        settings: loss variant and terms.
    """
    # Masked: log-probs elsewhere are arbitrary, and an infinite ratio would give a NaN gradient.
    logprobs = _learned(scores.logprobs, batch)
    old_logprobs = jax.lax.stop_gradient(logprobs)
    if batch.old_logprobs is not None:
        old = _learned(batch.old_logprobs, batch)
        old_logprobs = jnp.where(jnp.isnan(old), old_logprobs, old)
    loss, metrics = _policy_loss(logprobs, old_logprobs, batch, settings=settings)
    metrics = {"policy_loss": loss, "entropy": scores.entropy, **metrics}
    if batch.reference_logprobs is not None:
        reference = _learned(batch.reference_logprobs, batch)
        metrics["kl"] = SAMPLED_KL[settings.kl](logprobs, reference)
    if batch.reference is not None:
        metrics |= _top_k_kl(scores, batch.reference, batch)
    if "kl" in metrics:
        assert batch.kl_coef is not None
        loss += batch.kl_coef * metrics["kl"]
    if batch.teacher is not None:
        assert scores.gathered is not None
        # The teacher's tokens are the last ones.
        own = scores.gathered[..., -batch.teacher.tokens.shape[-1] :]
        metrics["distillation"] = topk.forward_kl(own, batch.teacher)
        loss += settings.distill_coef * metrics["distillation"]
    return loss, metrics


def _policy_loss(
    logprobs: PerToken, old_logprobs: PerToken, batch: DeviceBatch, *, settings: Learner
) -> tuple[PerToken, dict[str, PerToken]]:
    """The loss of the configured variant, and its metrics.

    A position that is clipped, which the losses define, is clipped low where its ratio is below 1,
    and else high.
    """
    variant = settings.variant
    assert variant.clip_high is not None
    clip = {"low": variant.clip_low, "high": variant.clip_high}

    def scale(values: PerToken) -> PerToken:
        """Ratio and importance weight are per rollout (gspo) or per token."""
        if settings.loss != "gspo":
            return values
        return rollout_mean(values, segments=batch.inputs.segments, learned=batch.inputs.learned)

    log_ratio = scale(logprobs - old_logprobs)
    if settings.loss == "cispo":
        loss, clipped = clipped_weight(log_ratio, logprobs, batch.advantages, **clip)
    else:
        loss, clipped = clipped_surrogate(log_ratio, batch.advantages, **clip)
    metrics = {
        "ratio_mean": jnp.exp(log_ratio),
        "ratio_max": jnp.exp(log_ratio),
        "clip_fraction": clipped,
        "clip_low": clipped * (log_ratio < 0),
        "clip_high": clipped * (log_ratio > 0),
    }
    if batch.processed_logprobs is not None:
        difference = scale(old_logprobs - _learned(batch.processed_logprobs, batch))
        weight = importance_weight(difference, cap=settings.importance_cap)
        capped = (weight >= settings.importance_cap).astype(jnp.float32)
        metrics |= {"importance_weight": weight, "importance_capped": capped}
        loss *= weight
    return loss, metrics


def _top_k_kl(scores: Scores, reference: TopKLogprobs, batch: DeviceBatch) -> dict[str, PerToken]:
    """The KL over the reference's top k, and metrics of the top k's coverage."""
    assert scores.gathered is not None
    # The reference's tokens are the first ones.
    k = reference.tokens.shape[-1]
    gathered = scores.gathered[..., :k]
    rank = topk.rank(reference, batch.inputs.targets)
    return {
        "kl": topk.reverse_kl(gathered, reference),
        "top_mass_reference": topk.top_k_mass(reference),
        "top_mass_policy": topk.gathered_mass(gathered),
        "sampled_rank": rank,
        "sampled_outside": (rank == k).astype(jnp.float32),
    }


def _learned(values: PerToken, batch: DeviceBatch) -> PerToken:
    return jnp.where(batch.inputs.learned, values, 0.0)
