"""The loss of a policy update at each token, put together from losses.py as the settings say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from configs.learner import Learner
from pipeline.compute.learner import topk
from pipeline.compute.learner.batches import DeviceBatch, Kept
from pipeline.compute.learner.losses import (
    SAMPLED_KL,
    clipped_surrogate,
    clipped_weight,
    importance_weight,
    rollout_mean,
)
from pipeline.compute.model.head import Scores

PerToken = Float[Array, "rows seq"]


def asked_for(batch: DeviceBatch) -> Int[Array, "rows seq k"] | None:
    """Tokens beside the targets whose log-probs the objective needs: those that were kept."""
    kept = [signal.tokens for signal in (batch.reference, batch.teacher) if signal is not None]
    return jnp.concatenate(kept, axis=-1) if kept else None


def objective(
    scores: Scores, batch: DeviceBatch, *, settings: Learner
) -> tuple[PerToken, dict[str, PerToken]]:
    """The loss of each token, and what describes it; both mean nothing where nothing is learned.

    Args:
        scores: of the current policy; `picked` are the tokens of `asked_for`.
        batch: what was learned from.
        settings: which loss, which terms.
    """
    # Elsewhere may stand anything, and an infinite ratio there would be a NaN in the gradient.
    logprobs = _learned(scores.logprobs, batch)
    drawn = jax.lax.stop_gradient(logprobs)
    if batch.old_logprobs is not None:
        old = _learned(batch.old_logprobs, batch)
        drawn = jnp.where(jnp.isnan(old), drawn, old)
    loss, about = _policy_loss(logprobs, drawn, batch, settings=settings)
    about = {"policy_loss": loss, "entropy": scores.entropy, **about}
    if batch.reference_logprobs is not None:
        reference = _learned(batch.reference_logprobs, batch)
        about["kl"] = SAMPLED_KL[settings.kl](logprobs, reference)
    if batch.reference is not None:
        about |= _top_k_kl(scores, batch.reference, batch)
    if "kl" in about:
        loss += settings.kl_coef * about["kl"]
    if batch.teacher is not None:
        assert scores.picked is not None
        # The teacher's tokens stand last.
        own = scores.picked[..., -batch.teacher.tokens.shape[-1] :]
        about["distillation"] = topk.forward_kl(own, batch.teacher)
        loss += settings.distill_coef * about["distillation"]
    return loss, about


def _policy_loss(
    logprobs: PerToken, drawn: PerToken, batch: DeviceBatch, *, settings: Learner
) -> tuple[PerToken, dict[str, PerToken]]:
    """The loss of the chosen variant; `drawn` are log-probs of the policy that drew."""
    variant = settings.variant
    assert variant.clip_high is not None
    clip = {"low": variant.clip_low, "high": variant.clip_high}
    # A ratio, and the weight that stands beside it, are of the rollout as a whole or of a token.
    scale = _of_rollout if settings.loss == "gspo" else _of_token
    log_ratio = scale(logprobs - drawn, batch)
    if settings.loss == "cispo":
        loss, clipped = clipped_weight(log_ratio, logprobs, batch.advantages, **clip)
    else:
        loss, clipped = clipped_surrogate(log_ratio, batch.advantages, **clip)
    about = {"clip_fraction": clipped}
    if batch.processed_logprobs is not None:
        difference = scale(drawn - _learned(batch.processed_logprobs, batch), batch)
        weight = importance_weight(difference, cap=settings.importance_cap)
        capped = (weight >= settings.importance_cap).astype(jnp.float32)
        about |= {"importance_weight": weight, "importance_capped": capped}
        loss *= weight
    return loss, about


def _top_k_kl(scores: Scores, reference: Kept, batch: DeviceBatch) -> dict[str, PerToken]:
    """The KL over the reference's likeliest tokens, and how much those tell."""
    assert scores.picked is not None
    # The reference's tokens stand first.
    k = reference.tokens.shape[-1]
    picked = scores.picked[..., :k]
    rank = topk.rank(reference, batch.inputs.targets)
    return {
        "kl": topk.reverse_kl(picked, reference),
        "top_mass_reference": topk.kept_mass(reference),
        "top_mass_policy": topk.top_mass(picked),
        "sampled_rank": rank,
        "sampled_outside": (rank == k).astype(jnp.float32),
    }


def _learned(values: PerToken, batch: DeviceBatch) -> PerToken:
    return jnp.where(batch.weights > 0, values, 0.0)


def _of_token(values: PerToken, batch: DeviceBatch) -> PerToken:
    del batch
    return values


def _of_rollout(values: PerToken, batch: DeviceBatch) -> PerToken:
    return rollout_mean(values, segments=batch.inputs.segments, learned=batch.weights > 0)
