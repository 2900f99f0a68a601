"""Log-probs, entropy and top k against the whole softmax, and the size of the largest array."""

from __future__ import annotations

import re
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.plan import HEAD_TOKENS, HEAD_VOCAB
from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model import head_score as head_module
from pipeline.compute.model.head import Head, scaled_logits
from pipeline.compute.model.head_sample import sample as sample_tokens
from pipeline.compute.model.head_score import Scores, score
from pipeline.compute.model.sharding import lowered, make_mesh
from pipeline.compute.model.top_k import TopK
from pipeline.compute.model.truncation import Truncation
from pipeline.compute.model.vocabulary import Vocabulary
from tests import tiny

ROWS, SEQ, EMBED, VOCAB, K, NUM_GATHERED = 8, 7, 16, 96, 9, 4
BANNED = (0, 5)
TEMPERATURE = 0.7
MESHES = [(1, 8, 1), (2, 2, 2)]


def draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


RNG = np.random.default_rng(0)
HIDDEN, EMBEDDING = draw(RNG, ROWS, SEQ, EMBED), draw(RNG, VOCAB, EMBED)
MASK = jnp.isin(jnp.arange(VOCAB), jnp.asarray(BANNED))
ALLOWED = [token for token in range(VOCAB) if token not in BANNED]
TARGETS = jnp.asarray(RNG.choice(ALLOWED, (ROWS, SEQ)), jnp.int32)
GATHERED = jnp.asarray(RNG.choice(ALLOWED, (ROWS, SEQ, NUM_GATHERED)), jnp.int32)


def mesh(data: int, fsdp: int, tp: int) -> Any:
    return make_mesh(jax.devices()[: data * fsdp * tp], fsdp=fsdp, tp=tp)


def make_head(
    *, tokens: int = 16, vocab: int = 32, softcap: float | None = None, on: Any = (1, 1, 1)
) -> Head:
    return Head(softcap, TEMPERATURE, tokens, vocab, mesh(*on))


def whole(hidden: jax.Array, *, softcap: float | None, embedding: jax.Array = EMBEDDING) -> Scores:
    """Reference scores from all logits at once."""
    scores = scaled_logits(
        hidden, embedding, softcap=softcap, temperature=TEMPERATURE, forbidden=MASK
    )
    log_z = jax.nn.logsumexp(scores, axis=-1)
    logprobs = scores - log_z[..., None]
    values, ids = jax.lax.top_k(logprobs, K)
    return Scores(
        logprobs=jnp.take_along_axis(logprobs, TARGETS[..., None], axis=-1)[..., 0],
        log_z=log_z,
        entropy=-jnp.sum(jnp.exp(logprobs) * jnp.where(MASK, 0.0, logprobs), axis=-1),
        gathered=jnp.take_along_axis(logprobs, GATHERED, axis=-1),
        top=TopK(values, ids),
    )


def ours(
    hidden: jax.Array, *, head: Head, embedding: jax.Array = EMBEDDING, top_k: int = 0
) -> Scores:
    return score(
        hidden, TARGETS, embedding, head=head, forbidden=MASK, gather_tokens=GATHERED, top_k=top_k
    )


def total(scores: Scores) -> jax.Array:
    """A sum with a random weight for each differentiable result."""
    rng = np.random.default_rng(1)
    assert scores.gathered is not None
    return (
        jnp.sum(scores.logprobs * draw(rng, ROWS, SEQ))
        + jnp.sum(scores.log_z * draw(rng, ROWS, SEQ))
        + jnp.sum(scores.gathered * draw(rng, ROWS, SEQ, NUM_GATHERED))
    )


def assert_equal(found: Scores, expected: Scores) -> None:
    assert expected.top is not None
    assert found.top is not None
    # Tokens whose scores differ only by rounding may be swapped.
    values = np.asarray(expected.top.logprobs)
    rest = [(0, 0)] * (values.ndim - 1)
    gaps = np.pad(-np.diff(values, axis=-1), [*rest, (1, 1)], constant_values=np.inf)
    clear = np.minimum(gaps[..., 1:], gaps[..., :-1]) > 1e-5
    assert clear.mean() > 0.9
    same = np.asarray(found.top.tokens) == np.asarray(expected.top.tokens)
    assert same[clear].all()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        (found._replace(top=None), found.top.logprobs),
        (expected._replace(top=None), expected.top.logprobs),
    )


def with_gradient(scored: Any, hidden: jax.Array = HIDDEN) -> tuple[jax.Array, Scores]:
    """The gradient of `total`, and the scores."""

    def run(hidden: jax.Array) -> tuple[jax.Array, Scores]:
        scores = scored(hidden)
        return total(scores), scores

    return jax.jit(jax.grad(run, has_aux=True))(hidden)


@cache
def reference(softcap: float | None) -> tuple[jax.Array, Scores]:
    """The gradient of `total`, and the scores from all logits at once."""
    return with_gradient(partial(whole, softcap=softcap))


@pytest.mark.parametrize(
    ("tokens", "vocab", "softcap", "on"),
    [
        (1, 96, 3.0, (1, 1, 1)),
        (5, 32, None, (1, 1, 1)),
        (1000, 1000, None, (1, 1, 1)),
        *((16, 7, 3.0, on) for on in MESHES),
    ],
)
def test_values_and_gradients_are_those_of_the_whole_softmax_in_any_blocks_and_shards(
    tokens, vocab, softcap, on
):
    head = make_head(tokens=tokens, vocab=vocab, softcap=softcap, on=on)
    grad, found = with_gradient(partial(ours, head=head, top_k=K))
    wanted, expected = reference(softcap)
    assert_equal(found, expected)
    np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-5)


def test_scores_far_above_the_first_block_are_exact():
    hidden, head = 50 * HIDDEN, make_head(tokens=16, vocab=8)
    scores = scaled_logits(hidden, EMBEDDING, softcap=None, temperature=TEMPERATURE, forbidden=MASK)
    # Far enough for exponentials shifted by the first block's largest score to overflow.
    assert np.max(scores.max(-1) - scores[..., :8].max(-1)) > 100
    found, expected = jax.jit(partial(ours, head=head))(hidden), whole(hidden, softcap=None)
    np.testing.assert_allclose(found.log_z, expected.log_z, rtol=1e-6)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(found.entropy, expected.entropy, rtol=1e-3, atol=1e-3)


def test_a_certain_token_has_no_gradient_in_bfloat16():
    """The mean row is the target's own row, of which rounding must leave nothing."""
    rows = EMBEDDING / jnp.linalg.norm(EMBEDDING, axis=-1, keepdims=True)
    embedding = (10 * rows).astype(jnp.bfloat16)
    hidden = 30 * embedding[TARGETS]

    def run(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = score(hidden, TARGETS, embedding, head=make_head(), forbidden=MASK)
        return jnp.sum(found.logprobs * 0.3), found.logprobs

    grad, logprobs = jax.jit(jax.grad(run, has_aux=True))(hidden)
    np.testing.assert_allclose(logprobs, 0, atol=0.01)
    # Rounding of 0.3 / TEMPERATURE alone would leave 0.001 of the row.
    np.testing.assert_allclose(grad.astype(jnp.float32), 0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("on", [(1, 1, 1), *MESHES])
def test_the_top_k_by_columns_is_that_of_a_sort(monkeypatch: pytest.MonkeyPatch, on):
    """More than four of the highest scores are in one column."""
    embedding = draw(np.random.default_rng(0), 131_072, EMBED)
    embedding = embedding.at[1::2048].multiply(3.0)
    arguments = (HIDDEN, TARGETS, embedding)
    head = make_head(on=on)
    mask = jnp.isin(jnp.arange(len(embedding)), jnp.asarray(BANNED))
    expected = score(*arguments, head=head, forbidden=mask, top_k=K)
    monkeypatch.setattr(head_module, "_BY_COLUMNS", {"cpu"})
    monkeypatch.setattr(head_module, "_TOP_K_BLOCK", (16, 16_384))
    found = jax.jit(lambda: score(*arguments, head=head, forbidden=mask, top_k=K))()
    assert expected.top is not None
    assert found.top is not None
    np.testing.assert_array_equal(found.top.tokens, expected.top.tokens)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def test_a_forbidden_target_gives_no_nan():
    def some(hidden: jax.Array) -> jax.Array:
        head = make_head(softcap=1.5)
        found = score(
            hidden, jnp.zeros_like(TARGETS), EMBEDDING, head=head, forbidden=MASK, top_k=VOCAB
        )
        return jnp.sum(found.logprobs) + jnp.sum(found.entropy)

    value, grad = jax.jit(jax.value_and_grad(some))(HIDDEN)
    assert np.isfinite(value)
    assert np.isfinite(grad).all()


def test_bfloat16_is_summed_in_float32():
    hidden, embedding = HIDDEN.astype(jnp.bfloat16), EMBEDDING.astype(jnp.bfloat16)
    exact = whole(hidden.astype(jnp.float32), softcap=None, embedding=embedding.astype(jnp.float32))
    scored = partial(ours, embedding=embedding, head=make_head())
    grad, found = with_gradient(scored, hidden)
    np.testing.assert_allclose(found.logprobs, exact.logprobs, rtol=1e-5, atol=1e-5)
    assert grad.dtype == jnp.bfloat16
    expected, _ = reference(None)
    error = np.linalg.norm(np.asarray(grad - expected, np.float32)) / np.linalg.norm(expected)
    assert error < 0.01


REAL_VOCABULARY = 262_144


def largest_shape(program: jax.stages.Compiled) -> tuple[int, str]:
    """Elements and shape of the largest array in a program's text, except the embedding."""
    shapes = set(re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.as_text() or ""))
    shapes -= {f"{REAL_VOCABULARY},64", f"64,{REAL_VOCABULARY}"}
    shapes -= {f"8,{REAL_VOCABULARY // 8},64"}  # by range of tokens, without a copy
    return max((prod(map(int, shape.split(","))), shape) for shape in shapes)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_promise_7_no_batch_by_seq_by_vocabulary_array_exists(devices: int):
    policy = tiny.make_policy(
        devices=devices, num_hidden_layers=1, vocab_size=REAL_VOCABULARY, hidden_size=64
    )
    # On each device 2,560 positions go through the head, more than one block.
    config = tiny.make_config(
        rollout={"max_prompt_tokens": 160, "max_new_tokens": 160},
        plan={
            "learner_devices": devices,
            "slots": 8 * devices,
            "slot_buckets": (),
            "micro_batch_tokens": 8 * 320 * devices,
        },
        learner={"updates_per_batch": 2, "kl_coef": 0.1},
    )
    vocabulary = Vocabulary(pad=0, stops=(1,), forbidden=(0, 2))
    learner = LearnerPrograms(policy, config, vocabulary)
    sampler = DecodePrograms(policy, config, vocabulary)
    # Learner: logits of a block of positions. Prefill computes none.
    for trace in (learner.trace_gradient, learner.trace_score):
        elements, shape = largest_shape(lowered(trace(8 * devices), policy.mesh).compile())
        assert elements == HEAD_TOKENS * HEAD_VOCAB, shape
    for traced in (sampler.trace_prefill(160), sampler.trace_segment(8 * devices)):
        elements, shape = largest_shape(lowered(traced, policy.mesh).compile())
        assert elements < 8 * REAL_VOCABULARY, shape


def test_promise_7_truncated_sampling_holds_at_most_four_blocks_of_scores():
    hidden = jnp.zeros((300, 64))
    drawn = jax.jit(
        partial(
            sample_tokens,
            head=Head(None, 1.0, HEAD_TOKENS, HEAD_VOCAB, mesh(1, 1, 1)),
            truncation=Truncation(50, 0.9, 0.01),
        )
    )
    program = drawn.lower(
        hidden,
        jnp.zeros((REAL_VOCABULARY, 64)),
        forbidden=jnp.zeros(REAL_VOCABULARY, bool),
        keys=jnp.zeros((300, 2), jnp.uint32),
        temperature=jnp.float32(1),
        noise=jnp.float32(1),
    ).compile()
    elements, shape = largest_shape(program)
    # Two equal blocks of rows; 256 rows have four times as many scores as 2,048 x 8,192.
    assert elements == 150 * REAL_VOCABULARY, shape
    assert " sort(" not in (program.as_text() or "")
