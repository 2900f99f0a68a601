"""The optimizer: gradient clipping, AdamW, warm-up and decay, on float32 adapters."""

from __future__ import annotations

import optax

from configs.schema import Config


def grpo_rate(config: Config) -> optax.Schedule:
    """Learning rate of the GRPO phase as a function of the number of its updates.

    Unused if the rate decays with the time used (`pipeline.deadline`): each step carries its rate.
    """
    learner = config.learner
    updates = learner.updates_per_batch
    decay = None if config.decay_steps is None else config.decay_steps * updates
    return _schedule(
        learner.schedule, peak=learner.lr, warmup=learner.warmup_steps * updates, decay=decay
    )


def sft_rate(config: Config) -> optax.Schedule:
    """Learning rate of the SFT phase as a function of the number of its updates."""
    sft = config.sft
    return _schedule(sft.schedule, peak=sft.lr, warmup=sft.warmup_steps, decay=sft.steps)


def _schedule(kind: str, *, peak: float, warmup: int, decay: int | None) -> optax.Schedule:
    """Linear warm-up over `warmup` updates, then constant or decaying to zero at `decay`."""
    # (n + 1) / warmup: the first update must not have a rate of zero.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    if kind == "constant" or decay is None:
        after: optax.Schedule = optax.constant_schedule(peak)
    elif kind == "linear":
        after = optax.linear_schedule(peak, 0.0, decay - warmup)
    else:
        after = optax.cosine_decay_schedule(peak, decay - warmup)
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def make_optimizer(config: Config, rate: optax.Schedule) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW (arXiv:1711.05101)."""
    learner = config.learner
    return optax.chain(
        optax.clip_by_global_norm(learner.max_grad_norm),
        optax.adamw(rate, b1=0.9, b2=learner.adam_b2, weight_decay=learner.weight_decay),
    )
