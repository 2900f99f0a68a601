"""The optimizer: clipped gradients, AdamW, warm-up and decay, on float32 adapters."""

from __future__ import annotations

import optax

from configs.schema import Config


def learning_rate(config: Config) -> optax.Schedule:
    """Learning rate as a function of the updates made so far."""
    learner = config.learner
    updates = learner.updates_per_batch
    warmup = learner.warmup_steps * updates
    # The first update must not be lost to a rate of zero, hence (n + 1) / warmup.
    rise = optax.linear_schedule(learner.lr / max(warmup, 1), learner.lr, max(warmup - 1, 1))
    if learner.schedule == "constant" or config.decay_steps is None:
        after: optax.Schedule = optax.constant_schedule(learner.lr)
    else:
        length = config.decay_steps * updates - warmup
        after = {
            "linear": optax.linear_schedule(learner.lr, 0.0, length),
            "cosine": optax.cosine_decay_schedule(learner.lr, length),
        }[learner.schedule]
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW (arXiv:1711.05101)."""
    learner = config.learner
    return optax.chain(
        optax.clip_by_global_norm(learner.max_grad_norm),
        optax.adamw(
            learning_rate(config),
            b1=learner.adam_b1,
            b2=learner.adam_b2,
            weight_decay=learner.weight_decay,
        ),
    )
