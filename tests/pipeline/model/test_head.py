"""Log-probs and entropy against the whole softmax, and what they never hold in memory."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.decode.programs import DecodePrograms
from pipeline.learner.programs import LearnerPrograms
from pipeline.model.head import FORBIDDEN, scaled_logits, token_logprobs
from pipeline.model.vocabulary import Vocabulary
from tests import tiny

BATCH, SEQ, EMBED, VOCAB = 3, 7, 5, 11
BANNED = (0, 4)
TEMPERATURE = 0.7
SOFTCAP = 1.5


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((BATCH, SEQ, EMBED)).astype(np.float32)
    embedding = rng.standard_normal((VOCAB, EMBED)).astype(np.float32)
    allowed = [token for token in range(VOCAB) if token not in BANNED]
    targets = rng.choice(allowed, (BATCH, SEQ)).astype(np.int32)
    return hidden, targets, embedding, np.isin(np.arange(VOCAB), BANNED)


def ours(hidden: Any, *, block: int) -> tuple[jax.Array, jax.Array]:
    _, targets, embedding, forbidden = map(jnp.asarray, inputs())
    return token_logprobs(
        jnp.asarray(hidden),
        targets,
        embedding,
        softcap=SOFTCAP,
        temperature=TEMPERATURE,
        forbidden=forbidden,
        positions_at_once=block,
    )


def whole(hidden: Any) -> tuple[jax.Array, jax.Array]:
    """The same from all logits at once, over the tokens that are left."""
    _, targets, embedding, forbidden = inputs()
    kept = np.flatnonzero(~forbidden)
    logits = jnp.einsum("bsd,vd->bsv", hidden, embedding[kept])
    capped = SOFTCAP * jnp.tanh(logits / SOFTCAP)
    scores = jax.nn.log_softmax(capped / TEMPERATURE, axis=-1)
    place = np.searchsorted(kept, targets)
    picked = jnp.take_along_axis(scores, place[..., None], axis=-1)[..., 0]
    return picked, -jnp.sum(jnp.exp(scores) * scores, axis=-1)


def test_by_hand():
    hidden = jnp.array([[[1.0], [2.0]]])
    embedding = jnp.log(jnp.array([[1.0], [3.0], [4.0]]))
    found, entropy = token_logprobs(
        hidden,
        jnp.array([[1, 0]]),
        embedding,
        softcap=None,
        temperature=2.0,
        forbidden=jnp.array([False, False, True]),
        positions_at_once=1,
    )
    # Scores are log(1), log(3) to the powers 1/2 and 1, without the third token.
    first = np.array([1.0, 3**0.5]) / (1 + 3**0.5)
    second = np.array([0.25, 0.75])
    np.testing.assert_allclose(found, [[np.log(first[1]), np.log(second[0])]], rtol=1e-6)
    expected = [-np.sum(p * np.log(p)) for p in (first, second)]
    np.testing.assert_allclose(entropy, [expected], rtol=1e-6)


@pytest.mark.parametrize("block", [1, 2, 3, SEQ, 100])
def test_values_are_those_of_the_whole_softmax_in_any_block(block: int):
    hidden = inputs()[0]
    for found, expected in zip(ours(hidden, block=block), whole(hidden), strict=True):
        assert found.shape == (BATCH, SEQ)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [2, SEQ])
def test_the_gradient_is_that_of_the_whole_softmax(block: int):
    hidden = inputs()[0]
    weights = np.random.default_rng(1).standard_normal((BATCH, SEQ)).astype(np.float32)

    def total(h: Any, f: Any) -> jax.Array:
        return jnp.sum(f(h)[0] * weights)

    found = jax.grad(lambda h: total(h, lambda x: ours(x, block=block)))(hidden)
    expected = jax.grad(lambda h: total(h, whole))(hidden)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_no_gradient_flows_through_the_entropy():
    hidden = inputs()[0]
    grad = jax.grad(lambda h: jnp.sum(ours(h, block=2)[1]))(hidden)
    assert not np.any(grad)
    assert np.any(jax.grad(lambda h: jnp.sum(whole(h)[1]))(hidden))


def test_a_forbidden_target_gives_no_nan():
    hidden, _, embedding, forbidden = map(jnp.asarray, inputs())
    targets = jnp.zeros((BATCH, SEQ), jnp.int32)

    def total(h: jax.Array) -> jax.Array:
        found, entropy = token_logprobs(
            h,
            targets,
            embedding,
            softcap=SOFTCAP,
            temperature=0.5,
            forbidden=forbidden,
            positions_at_once=2,
        )
        return jnp.sum(found * 0.0) + jnp.sum(entropy)

    value, grad = jax.value_and_grad(total)(hidden)
    assert np.isfinite(value)
    assert np.isfinite(grad).all()


def test_scaled_logits_are_float32_whatever_the_type():
    hidden, _, embedding, forbidden = inputs()
    half = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(embedding, jnp.bfloat16)
    given: dict[str, Any] = {"temperature": 2.0, "forbidden": jnp.asarray(forbidden)}
    found = scaled_logits(*half, softcap=None, **given)
    assert found.dtype == jnp.float32
    exact = [np.asarray(x, np.float64) for x in half]
    expected = np.einsum("bsd,vd->bsv", *exact) / 2
    np.testing.assert_allclose(found[..., ~forbidden], expected[..., ~forbidden], rtol=1e-5)
    assert (np.asarray(found)[..., forbidden] == FORBIDDEN).all()
    capped = np.asarray(scaled_logits(*half, softcap=3.0, **given))
    by_hand = 3 * np.tanh(expected * 2 / 3) / 2
    np.testing.assert_allclose(capped[..., ~forbidden], by_hand[..., ~forbidden], rtol=1e-5)
    assert (capped[..., forbidden] == FORBIDDEN).all()


REAL_VOCABULARY = 262_144
LIMIT = 2_048


def largest_shape(program: jax.stages.Compiled) -> tuple[int, str]:
    """Elements and shape of the largest array in a program's text but the embedding itself."""
    shapes = set(re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.as_text() or ""))
    shapes -= {f"{REAL_VOCABULARY},64", f"64,{REAL_VOCABULARY}"}
    return max((prod(map(int, shape.split(","))), shape) for shape in shapes)


@pytest.mark.parametrize("devices", [1, 8])
def test_invariant_3_no_batch_by_seq_by_vocabulary_array_exists(devices: int):
    policy = tiny.make_policy(
        devices=devices, num_hidden_layers=1, vocab_size=REAL_VOCABULARY, hidden_size=64
    )
    # On each device 2,560 positions go through the head, more than may be there at once.
    config = tiny.make_config(
        rollout={"max_prompt_tokens": 160, "max_new_tokens": 160},
        plan={
            "learner_devices": devices,
            "rollout_rows": 8 * devices,
            "micro_batch_rows": 8 * devices,
            "head_tokens": LIMIT,
        },
        learner={"updates_per_batch": 2, "kl_coef": 0.1},
    )
    vocabulary = Vocabulary(pad=0, stops=(1,), forbidden=(0, 2))
    learner = LearnerPrograms(policy, config, vocabulary).compile()
    prefills, segment = DecodePrograms(policy, config, vocabulary).compile()
    for program, expected in (
        (learner.gradient[320], LIMIT),
        (learner.score[320], LIMIT),
        (prefills[160], 8),
        (segment, 8),
    ):
        elements, shape = largest_shape(program)
        assert elements <= LIMIT * REAL_VOCABULARY, shape
        # The logits are there, in blocks as large as they may be, and of prompts only the last.
        assert elements == expected * REAL_VOCABULARY, shape
