"""Packing: each demonstration once per epoch, not truncated, no overlap, weights with sum 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.batches import BatchShape, PackedRow, padding_metrics
from pipeline.contracts.rollouts import Demonstration
from pipeline.inputs.dataset.packing import first_fit, packed_batches, sequences_for_step

LENGTH = 16
SHAPES = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=50)


def make_demonstrations(shapes: Sequence[tuple[int, int]]) -> list[Demonstration]:
    """Demonstrations whose tokens encode their location: 100 times the id, counting up."""
    return [
        Demonstration(
            number,
            np.arange(prompt, dtype=np.int32) + 100 * number,
            np.arange(prompt, prompt + new, dtype=np.int32) + 100 * number,
        )
        for number, (prompt, new) in enumerate(shapes, start=1)
    ]


def step(examples: Sequence[Demonstration], number: int, *, seed: int = 0) -> list[PackedRow]:
    return sequences_for_step(examples, seed=seed, step=number, sequences=3, length=LENGTH)


@given(SHAPES, st.integers(0, 5))
def test_every_epoch_contains_each_demonstration_once(shapes: list[tuple[int, int]], seed: int):
    examples = make_demonstrations(shapes)
    drawn: list[int] = []
    number = 0
    while len(drawn) < 3 * len(examples):
        for packed in step(examples, number, seed=seed):
            assert 0 < sum(map(len, packed)) <= LENGTH
            drawn += [example.id for example in packed]
        number += 1
    for epoch in range(2):
        ids = drawn[epoch * len(examples) : (epoch + 1) * len(examples)]
        assert Counter(ids) == Counter(example.id for example in examples)


def test_a_step_is_a_function_of_seed_and_number():
    examples = make_demonstrations([(2, 3)] * 40)
    ids = [[e.id for packed in step(examples, n) for e in packed] for n in (0, 1, 2, 1)]
    assert ids[1] == ids[3]
    assert ids[0] != ids[1]
    assert [e.id for packed in step(examples, 1, seed=1) for e in packed] != ids[1]


def test_sequences_are_nearly_full():
    rng = np.random.default_rng(0)
    examples = make_demonstrations([(int(p), int(n)) for p, n in rng.integers(1, 9, (400, 2))])
    used = [sum(map(len, packed)) for number in range(30) for packed in step(examples, number)]
    assert np.mean(used) > 0.9 * LENGTH


def test_a_demonstration_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="demonstration 1 has 17 tokens; a row has 16"):
        step(make_demonstrations([(9, 8)]), 0)


@given(SHAPES)
def test_the_arrays_hold_the_demonstrations(shapes: list[tuple[int, int]]):
    sequences = step(make_demonstrations(shapes), 0)
    shape = BatchShape(rows=2, tail_rows=1, length=LENGTH, pad=-1)
    batches = packed_batches(sequences, shape=shape)
    assert [len(batch.tokens) for batch in batches] == [2, 1]
    assert sum(batch.weights.sum() for batch in batches) == pytest.approx(1.0)
    learned = sum(len(example.completion_tokens) for packed in sequences for example in packed)
    assert sum(batch.num_tokens for batch in batches) == learned
    rows = [
        (batch.tokens[row], batch.targets[row], batch.weights[row], batch.segments[row],
         batch.positions[row])
        for batch in batches
        for row in range(len(batch.tokens))
    ]  # fmt: skip
    for packed, (tokens, targets, weights, segments, positions) in zip(
        sequences, rows, strict=True
    ):
        ends = np.cumsum([0, *map(len, packed)])
        for number, (example, (start, end)) in enumerate(
            zip(packed, pairwise(ends), strict=True), start=1
        ):
            whole = np.concatenate([example.prompt_tokens, example.completion_tokens])
            np.testing.assert_array_equal(tokens[start:end], whole)
            np.testing.assert_array_equal(positions[start:end], np.arange(len(whole)))
            assert set(segments[start:end].tolist()) == {number}
            learned_at = np.flatnonzero(weights[start:end]) + start
            np.testing.assert_array_equal(targets[learned_at], example.completion_tokens)
        assert (tokens[ends[-1] :] == -1).all()
        assert not weights[ends[-1] :].any()
        assert not segments[ends[-1] :].any()


def test_first_fit_by_hand():
    # 7 leaves 3, 6 leaves 4; 4 goes into the second row, 3 into the first, and 2 opens a third.
    assert first_fit([7, 6, 4, 3, 2], capacity=10) == [[0, 3], [1, 2], [4]]
    assert first_fit([], capacity=10) == []
    with pytest.raises(ValueError, match="a sequence has 11 tokens; a row has 10"):
        first_fit([11], capacity=10)


@given(st.lists(st.integers(1, 20), max_size=60))
def test_first_fit_decreasing_holds_everything_in_few_rows(lengths: list[int]):
    descending = sorted(lengths, reverse=True)
    rows = first_fit(descending, capacity=20)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sums = [sum(descending[index] for index in row) for row in rows]
    assert all(0 < total <= 20 for total in sums)
    # Two rows that are at most half full would fit into one.
    assert sum(2 * total <= 20 for total in sums) <= 1


def test_a_small_remainder_goes_into_small_micro_batches():
    shape = BatchShape(rows=8, tail_rows=2, length=4, pad=0)
    assert shape.sizes == (8, 2)
    expected = {0: [], 1: [2], 4: [2, 2], 5: [8], 8: [8], 9: [8, 2], 12: [8, 2, 2], 13: [8, 8]}
    assert {rows: shape.split(rows) for rows in expected} == expected
    one_size = BatchShape(rows=2, tail_rows=2, length=4, pad=0)
    assert one_size.sizes == (2,)
    assert one_size.split(3) == [2, 2]


@given(st.integers(0, 100), st.integers(1, 6), st.integers(1, 8))
def test_micro_batches_have_compiled_sizes_full_ones_first(rows: int, tail: int, of: int):
    shape = BatchShape(rows=tail * of, tail_rows=tail, length=4, pad=0)
    sizes = shape.split(rows)
    assert set(sizes) <= set(shape.sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert 0 <= sum(sizes) - rows < max(shape.rows / 2, tail)


def test_padding_is_counted():
    sequences = step(make_demonstrations([(3, 5), (4, 4), (2, 7)]), 0)
    batches = packed_batches(sequences, shape=BatchShape(4, 1, LENGTH, 0))
    positions = sum(batch.tokens.size for batch in batches)
    used = sum(len(example) for packed in sequences for example in packed)
    found = padding_metrics(batches)
    assert found == {
        "positions": positions,
        "tokens_padded": positions - used,
        "padded_share": (positions - used) / positions,
    }
    assert padding_metrics([]) == dict.fromkeys(found, 0.0)
