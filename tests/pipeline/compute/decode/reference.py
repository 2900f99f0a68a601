"""Rollouts sampled by an engine, and their scores from a forward pass over whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.compute.decode.engine import Engine
from pipeline.compute.decode.state import SamplingParams
from pipeline.compute.model.gumbel import gumbel_noise, keys_at
from pipeline.compute.model.head import scaled_logits
from pipeline.compute.model.policy import Params, Policy
from pipeline.types import Completion, RolloutRequest
from tests import tiny

CONFIG = tiny.make_config()
LONGEST, NEW = CONFIG.rollout.max_prompt_tokens, CONFIG.rollout.max_new_tokens
LENGTHS = [1, 14, 6, 9, 13, 2, 7, 11, 3, 14, 5, 8, 12, 10, 4, 14, 6, 1, 13, 9, 2, 11, 7, 5]
REQUESTS = tiny.make_requests(LENGTHS, step=8)
"""Requests whose completions have lengths that fill every slot size of these tests."""
_ROWS = 32
"""Rows of the one program that scores; more completions are refused."""


def generate(
    engine: Engine,
    requests: Sequence[RolloutRequest] = REQUESTS,
    *,
    temperature: float = CONFIG.rollout.temperature,
    adapter: Params | None = None,
) -> list[Completion]:
    """Completions of version 3."""
    adapter = tiny.probe() if adapter is None else adapter
    return engine.generate(
        requests, adapter=adapter, version=3, adapter_sha256="abc", temperature=temperature
    )


@partial(jax.jit, static_argnums=0)
def _scores(
    policy: Policy,
    weights: tuple[Params, Params],
    tokens: jax.Array,
    keys: jax.Array,
    at: jax.Array,
    sampling: SamplingParams,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and noisy scores of every position of whole sequences, without a cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = policy.bind(*weights)(tokens, positions)
    logits = scaled_logits(
        hidden,
        policy.embedding(weights[0]),
        softcap=policy.architecture.shape.final_softcap,
        temperature=sampling.temperature,
        forbidden=tiny.VOCABULARY.forbidden_mask(tiny.VOCAB),
    )
    noise = jax.vmap(lambda at: gumbel_noise(keys_at(keys, at), 0, tiny.VOCAB), 1, 1)(at)
    return jax.nn.log_softmax(logits), logits + sampling.noise * noise


def recompute(
    completions: Sequence[Completion],
    temperature: float = CONFIG.rollout.temperature,
    *,
    adapter: Params | None = None,
    model: tuple[Policy, Params] | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Log-probs and noisy scores, `new vocab`, at each completion token.

    The input is the completion's own tokens: if every token has the best noisy score, sampling one
    token at a time with a forward pass over all earlier tokens would give the same completion.
    """
    total = LONGEST + NEW
    tokens = np.zeros((_ROWS, total), np.int32)
    at = np.zeros((_ROWS, total), np.int32)
    keys = np.zeros((_ROWS, 2), np.uint32)
    for row, c in enumerate(completions):
        whole = np.concatenate([c.prompt_tokens, c.tokens])
        tokens[row, : len(whole)] = whole
        keys[row] = c.name.key(CONFIG.run.seed)
        at[row] = np.maximum(np.arange(total) - len(c.prompt_tokens) + 1, 0)
    policy, base = model or (tiny.policy(), tiny.base())
    adapter = tiny.probe() if adapter is None else adapter
    found = _scores(policy, (base, adapter), tokens, keys, at, SamplingParams.of(temperature))
    logprobs, scores = map(np.asarray, found)
    spans = [
        slice(len(c.prompt_tokens) - 1, len(c.prompt_tokens) - 1 + len(c.tokens))
        for c in completions
    ]
    return [(logprobs[row, at], scores[row, at]) for row, at in enumerate(spans)]


def check_tokens(
    completions: Sequence[Completion], *args: float, bound: float = 1e-5, **model: Any
) -> None:
    """Each token has the best noisy score, and the log-prob, of a forward pass without a cache."""
    expected = recompute(completions, *args, **model)
    for completion, (logprobs, scores) in zip(completions, expected, strict=True):
        np.testing.assert_array_equal(completion.tokens, scores.argmax(axis=1))
        picked = logprobs[np.arange(len(completion.tokens)), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, picked, rtol=0, atol=bound)
