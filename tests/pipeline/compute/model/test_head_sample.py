"""Samples in two levels, columns and their tokens: exact, and the same in any blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pipeline.compute.model.gumbel import gumbel_noise
from pipeline.compute.model.head import FORBIDDEN, Head, scaled_logits
from pipeline.compute.model.head_sample import Columns, sample
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.truncation import Truncation

EMBED, VOCAB = 16, 4096
MEMBERS, COUNT = 4, 128
"""Tokens of a column of this vocabulary, and columns of a range."""
TOP_K = Truncation(top_k=300, top_p=1.0, min_p=0.0)
BANNED = (0, 5, 300, *range(1024, 1024 + MEMBERS * COUNT, COUNT))
"""Among them all tokens of a column."""


def make_head(*, tokens: int = 16, vocab: int = VOCAB, on: Any = (1, 1, 1)) -> Head:
    data, fsdp, tp = on
    mesh = make_mesh(jax.devices()[: data * fsdp * tp], fsdp=fsdp, tp=tp)
    return Head(None, 1.0, tokens, vocab, mesh)


def keys_for(rows: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, 2**32, (rows, 2), np.uint32))


RNG = np.random.default_rng(0)
HIDDEN = jnp.asarray(RNG.standard_normal((24, EMBED)), jnp.float32)
EMBEDDING = jnp.asarray(RNG.standard_normal((VOCAB, EMBED)), jnp.float32)
MASK = jnp.isin(jnp.arange(VOCAB), jnp.asarray(BANNED))


def draw(hidden: jax.Array, embedding: jax.Array, keys: jax.Array, **how: Any) -> Any:
    settings = {"head": make_head(), "forbidden": MASK, "temperature": 0.7, "noise": 1.0, **how}
    scalars = {name: jnp.float32(settings.pop(name)) for name in ("temperature", "noise")}
    return jax.jit(partial(sample, **settings))(hidden, embedding, keys=keys, **scalars)


def by_hand(scores: np.ndarray, keys: jax.Array) -> np.ndarray:
    """The definition: a column by its mass, then one of its tokens; `COUNT` columns a range."""
    vocab, tokens = scores.shape[1], scores.shape[1] // 8
    number, place = np.divmod(np.arange(vocab), tokens)
    member = place // COUNT
    # The last row of a range ends with the range.
    column = number * COUNT + place - np.minimum(member * COUNT, tokens - COUNT)
    masses = np.stack([np.bincount(column, row, minlength=8 * COUNT) for row in np.exp(scores)])
    with np.errstate(divide="ignore"):
        shares = np.log(masses) + np.asarray(gumbel_noise(keys, 0, 8 * COUNT))
    noise = np.asarray(gumbel_noise(keys, 2**30, int(member.max()) + 1))[:, member]
    in_column = column == shares.argmax(axis=-1)[:, None]
    return np.where(in_column, scores + noise, -np.inf).argmax(axis=-1)


@pytest.mark.parametrize("vocab", [1032])
def test_every_token_of_a_vocabulary_that_columns_do_not_divide_is_in_one_of_them(vocab: int):
    columns = Columns.of(vocab)
    column = jnp.arange(8 * columns.count)
    ids = np.asarray(columns.ids(column))
    repeated = np.asarray(columns.is_repeated(jnp.arange(columns.members), column[:, None]))
    np.testing.assert_array_equal(np.sort(ids[~repeated]), np.arange(vocab))
    rows = jnp.stack([columns.row(jnp.arange(vocab), jnp.int32(n)) for n in range(columns.members)])
    np.testing.assert_array_equal(rows.reshape(len(rows), -1).T, ids)

    keys, embedding, mask = keys_for(len(HIDDEN)), EMBEDDING[:vocab], MASK[:vocab]
    scores = scaled_logits(HIDDEN, embedding, softcap=None, temperature=0.7, forbidden=mask)
    expected = by_hand(np.asarray(scores, np.float64), keys)
    for truncation in (None, Truncation(top_k=vocab, top_p=1.0, min_p=0.0)):
        found, logprobs, kept = draw(HIDDEN, embedding, keys, forbidden=mask, truncation=truncation)
        np.testing.assert_array_equal(found, expected)
        wanted = jax.nn.log_softmax(scores)[jnp.arange(len(HIDDEN)), found]
        for got in (logprobs, kept):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("on", "vocab"),
    [((1, 1, 1), 1500), ((2, 2, 2), 100)],
)
@pytest.mark.parametrize("truncation", [None, TOP_K])
def test_blocks_and_devices_change_nothing(
    on: tuple[int, int, int], vocab: int, truncation: Truncation | None
):
    keys = keys_for(len(HIDDEN))
    found, logprobs, kept = draw(
        HIDDEN, EMBEDDING, keys, head=make_head(vocab=vocab, on=on), truncation=truncation
    )
    scores = scaled_logits(HIDDEN, EMBEDDING, softcap=None, temperature=0.7, forbidden=MASK)
    left = np.asarray(scores, np.float64)
    if truncation is not None:
        lowest = np.sort(left, axis=-1)[:, -truncation.top_k]
        left = np.where(left >= lowest[:, None], left, -np.inf)
    np.testing.assert_array_equal(found, by_hand(left, keys))
    for values, got in ((scores, logprobs), (left, kept)):
        expected = jax.nn.log_softmax(jnp.asarray(values))[jnp.arange(len(HIDDEN)), found]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_scores_far_above_the_first_block_are_exact():
    keys, head = keys_for(len(HIDDEN)), make_head(vocab=512)
    embedding = EMBEDDING.at[512:].multiply(30.0)
    found, logprobs, _ = draw(HIDDEN, embedding, keys, head=head)
    scores = scaled_logits(HIDDEN, embedding, softcap=None, temperature=0.7, forbidden=MASK)
    assert np.max(scores.max(-1) - scores[:, :512].max(-1)) > 100
    assert np.isfinite(logprobs).all()
    expected = jax.nn.log_softmax(scores)[jnp.arange(len(HIDDEN)), found]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-4, atol=1e-3)
    assert np.max(logprobs) <= 0
    assert not np.isin(np.asarray(found), BANNED).any()


def test_tokens_have_their_probabilities():
    """A peaked distribution: the counts of each likely token, and of groups of the others."""
    rng = np.random.default_rng(3)
    scores = rng.standard_normal(VOCAB).astype(np.float32)
    scores[rng.choice(VOCAB, 40, replace=False)] += 9.0
    # Two likely tokens in one column, and a rare one beside them.
    scores[[2048 + 7, 2048 + 7 + COUNT, 2048 + 7 + 2 * COUNT]] = 10.0, 9.5, 2.0
    scores[list(BANNED)] = FORBIDDEN
    embedding = jnp.zeros((VOCAB, EMBED)).at[:, 0].set(scores)
    total = 20_480
    hidden = jnp.zeros((total, EMBED)).at[:, 0].set(1.0)
    expected = np.exp(scores.astype(np.float64) - scores.max())
    expected /= expected.sum()
    head = make_head(tokens=4096)
    tokens, _, _ = draw(hidden, embedding, keys_for(total), head=head, temperature=1.0)
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    assert counts[list(BANNED)].sum() == 0
    likely = expected * total > 50
    assert likely.sum() > 30
    rest = np.arange(VOCAB)[~likely] % 128 // 16
    groups = [np.bincount(rest, x[~likely], minlength=8) for x in (counts, expected * total)]
    observed, wanted = (
        np.concatenate([x[likely], group])
        for x, group in zip((counts, expected * total), groups, strict=True)
    )
    used = wanted > 5
    found = stats.chisquare(
        observed[used], wanted[used] * observed[used].sum() / wanted[used].sum()
    )
    assert found.pvalue > 1e-3
