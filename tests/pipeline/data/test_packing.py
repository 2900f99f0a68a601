"""Packing: each demonstration once per epoch, not truncated, no overlap, weights with sum 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.packed_batch import (
    BatchShape,
    PackedRow,
    padding_metrics,
)
from pipeline.data.packing import (
    first_fit,
    packed_batches,
    sequences_for_step,
)
from pipeline.types import Demonstration

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


@given(SHAPES)
def test_the_arrays_hold_the_demonstrations(shapes: list[tuple[int, int]]):
    sequences = step(make_demonstrations(shapes), 0)
    batches = packed_batches(sequences, shape=BatchShape(2, 1, LENGTH, pad=-1))
    assert [len(batch.tokens) for batch in batches] == [2, 1]
    assert sum(batch.weights.sum() for batch in batches) == pytest.approx(1.0)
    assert all(batch.prefixes is None for batch in batches)
    padded = 3 * LENGTH - sum(len(one) - 1 for packed in sequences for one in packed)
    assert padding_metrics(batches) == {
        "positions": 3 * LENGTH,
        "tokens_padded": padded,
        "padded_share": padded / (3 * LENGTH),
    }
    for packed, targets, weights in zip(
        sequences,
        np.concatenate([batch.targets for batch in batches]),
        np.concatenate([batch.weights for batch in batches]),
        strict=True,
    ):
        learned = np.concatenate([one.completion_tokens for one in packed])
        np.testing.assert_array_equal(targets[weights > 0], learned)
        assert (targets[weights == 0] == -1).all()


def test_a_sequence_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="demonstration 1 has 17 tokens; a row has 16"):
        step(make_demonstrations([(9, 8)]), 0)
    with pytest.raises(ValueError, match="a sequence has 8 positions; a row has 7"):
        first_fit([make_demonstrations([(4, 5)])], capacity=7)


def test_a_small_remainder_goes_into_small_micro_batches():
    shape = BatchShape(rows=8, tail_rows=2, length=4, pad=0)
    assert shape.sizes == (8, 2)
    expected = {0: [], 1: [2], 4: [2, 2], 5: [8], 8: [8], 9: [8, 2], 12: [8, 2, 2], 13: [8, 8]}
    assert {rows: shape.split(rows) for rows in expected} == expected
    one_size = BatchShape(rows=2, tail_rows=2, length=4, pad=0)
    assert one_size.sizes == (2,)
    assert one_size.split(3) == [2, 2]
