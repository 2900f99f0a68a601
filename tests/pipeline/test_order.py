"""Data order: a pure function of seed and step, each epoch complete, no prompt twice in a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.datatypes import Prompt
from pipeline.order import prompts_for_step


def _prompts(total: int) -> list[Prompt]:
    return [Prompt(n, str(n), np.zeros(1, np.int32), "", {}) for n in range(total)]


def _ids(total: int, *, seed: int, step: int, per_step: int) -> list[int]:
    drawn = prompts_for_step(_prompts(total), seed=seed, step=step, prompts_per_step=per_step)
    return [prompt.id for prompt in drawn]


@given(st.data(), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_epochs_are_complete_and_steps_without_repetition(data, total: int, seed: int):
    per_step = data.draw(st.integers(1, total))
    epochs = 2 * per_step + 1
    steps = -(-epochs * total // per_step)
    drawn = [_ids(total, seed=seed, step=step, per_step=per_step) for step in range(steps)]
    assert all(len(set(ids)) == per_step for ids in drawn)
    stream = [id_ for ids in drawn for id_ in ids]
    for epoch in range(epochs):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_the_order_is_the_same_on_every_machine():
    drawn = [_ids(7, seed=3, step=step, per_step=3) for step in range(5)]
    assert drawn == [[6, 1, 5], [2, 4, 3], [0, 3, 5], [6, 4, 0], [2, 1, 4]]


def test_seeds_and_epochs_differ():
    first = _ids(50, seed=0, step=0, per_step=50)
    assert first != _ids(50, seed=1, step=0, per_step=50)
    assert first != _ids(50, seed=0, step=1, per_step=50)
    assert first != list(range(50))


def test_a_late_step_costs_no_more_than_an_early_one():
    # 10**9 epochs behind; the chain of epochs that depend on each other is at most per_step long.
    assert len(set(_ids(17, seed=0, step=10**9, per_step=16))) == 16


def test_each_prompt_is_as_likely_in_each_place():
    counts = np.zeros(5)
    for seed in range(400):
        counts[_ids(5, seed=seed, step=1, per_step=3)[0]] += 1
    assert counts.min() > 50


def test_a_step_of_more_prompts_than_there_are_is_refused():
    message = r"rollout\.prompts_per_step = 9 is more than the 8 prompts of data\.train; at most 8"
    with pytest.raises(ValueError, match=message):
        _ids(8, seed=0, step=0, per_step=9)
