"""Packing: every example once an epoch, never cut, never overlapping, weights that sum to one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.packing import Packed, packed_batches, sequences_for_step
from pipeline.datatypes import Example

LENGTH = 16
SHAPES = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=50)


def make_examples(shapes: Sequence[tuple[int, int]]) -> list[Example]:
    """Examples whose tokens say where they come from: 100 times the id, and counting."""
    return [
        Example(
            number,
            np.arange(prompt, dtype=np.int32) + 100 * number,
            np.arange(prompt, prompt + new, dtype=np.int32) + 100 * number,
        )
        for number, (prompt, new) in enumerate(shapes, start=1)
    ]


def step(examples: Sequence[Example], number: int, *, seed: int = 0) -> list[Packed]:
    return sequences_for_step(examples, seed=seed, step=number, sequences=3, length=LENGTH)


@given(SHAPES, st.integers(0, 5))
def test_epochs_follow_each_other_and_hold_each_example_once(
    shapes: list[tuple[int, int]], seed: int
):
    examples = make_examples(shapes)
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
    examples = make_examples([(2, 3)] * 40)
    ids = [[e.id for packed in step(examples, n) for e in packed] for n in (0, 1, 2, 1)]
    assert ids[1] == ids[3]
    assert ids[0] != ids[1]
    assert [e.id for packed in step(examples, 1, seed=1) for e in packed] != ids[1]


def test_sequences_are_nearly_full():
    rng = np.random.default_rng(0)
    examples = make_examples([(int(p), int(n)) for p, n in rng.integers(1, 9, (400, 2))])
    used = [sum(map(len, packed)) for number in range(30) for packed in step(examples, number)]
    assert np.mean(used) > 0.9 * LENGTH


def test_an_example_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="example 1 has 17 tokens; 16 fit"):
        step(make_examples([(9, 8)]), 0)


@given(SHAPES)
def test_the_arrays_hold_the_examples(shapes: list[tuple[int, int]]):
    sequences = step(make_examples(shapes), 0)
    batches = packed_batches(sequences, rows=2, length=LENGTH, pad=-1)
    assert len(batches) == 2
    assert sum(batch.weights.sum() for batch in batches) == pytest.approx(1.0)
    learned = sum(len(example.completion_tokens) for packed in sequences for example in packed)
    assert sum(batch.num_tokens for batch in batches) == learned
    rows = [
        (batch.tokens[row], batch.targets[row], batch.weights[row], batch.segments[row],
         batch.positions[row])
        for batch in batches
        for row in range(2)
    ]  # fmt: skip
    for packed, (tokens, targets, weights, segments, positions) in zip(
        [*sequences, ()], rows, strict=True
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
