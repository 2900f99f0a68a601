"""Reference implementation of GRPO: one batch, whole logits, two layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.compute.model.policy import Params
from pipeline.types import Rollout
from tests import tiny

CONFIG = tiny.make_config()


@dataclasses.dataclass(frozen=True)
class Whole:
    """All rollouts in one batch, and the loss on them with all logits at once."""

    tokens: np.ndarray
    targets: np.ndarray
    learned: np.ndarray
    advantages: np.ndarray

    @staticmethod
    def of(rollouts: Sequence[Rollout]) -> Whole:
        shape = (len(rollouts), CONFIG.rollout.max_tokens)
        whole = Whole(
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, bool),
            np.array([rollout.advantage for rollout in rollouts], np.float32),
        )
        for row, rollout in enumerate(rollouts):
            prompt, new = rollout.completion.prompt_tokens, rollout.completion.tokens
            line = np.concatenate([prompt, new])
            whole.tokens[row, : len(line)] = line
            whole.targets[row, : len(line) - 1] = line[1:]
            whole.learned[row, len(prompt) - 1 : len(line) - 1] = True
        return whole

    def weights(self, mode: str) -> np.ndarray:
        if mode == "token":
            return self.learned / self.learned.sum()
        return self.learned / (len(self.learned) * self.learned.sum(axis=1, keepdims=True))


def _log_softmax(
    adapter: Params, base: Params, tokens: Any, temperature: float = CONFIG.rollout.temperature
) -> jax.Array:
    forbidden = np.isin(np.arange(tiny.VOCAB), tiny.VOCABULARY.forbidden)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = tiny.policy(layers=2).bind(base, adapter)(jnp.asarray(tokens), positions)
    scores = hidden @ base["embedder.input_embedding"].T / temperature
    return jax.nn.log_softmax(jnp.where(forbidden, -jnp.inf, scores))


def _loss(
    adapter: Params, base: Params, batch: tuple[Any, ...], old: Any, reference: Any, beta: Any
) -> tuple[jax.Array, jax.Array]:
    tokens, targets, weights, advantages = batch
    scores = _log_softmax(adapter, base, tokens)
    scores = jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    scores = jnp.where(weights > 0, scores, 0.0)
    ratio = jnp.exp(scores - jnp.where(jnp.isnan(old), jax.lax.stop_gradient(scores), old))
    gain = jnp.minimum(ratio * advantages[:, None], jnp.clip(ratio, 0.8, 1.2) * advantages[:, None])
    log_r = jnp.where(jnp.isnan(reference), scores, reference) - scores
    kl = jnp.exp(log_r) - log_r - 1
    return -jnp.sum(weights * (gain - beta * kl)), scores


log_softmax = jax.jit(_log_softmax)
"""Log-prob of every token of the vocabulary at every position, `batch seq vocab`."""

_grpo = jax.jit(jax.value_and_grad(_loss, has_aux=True))


def grpo(
    whole: Whole,
    *,
    adapter: Params,
    mode: str = "token",
    old: np.ndarray | None = None,
    reference: np.ndarray | None = None,
    beta: float = 0.0,
) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
    """Loss, log-probs of the learned tokens (0 elsewhere), and gradient.

    Args:
        whole: the batch.
        adapter: of the policy.
        mode: `learner.token_weights`.
        old: old log-probs; None: those of this policy.
        reference: log-probs of the base; None: this policy's, so that the KL is 0.
        beta: weight of the KL term.
    """
    batch = (whole.tokens, whole.targets, whole.weights(mode), whole.advantages)
    unknown = np.full(whole.tokens.shape, np.nan, np.float32)  # one program for all cases
    old, reference = (unknown if given is None else given for given in (old, reference))
    (value, scores), grads = _grpo(adapter, tiny.base(layers=2), batch, old, reference, beta)
    return float(value), np.asarray(scores), {name: np.asarray(g) for name, g in grads.items()}
