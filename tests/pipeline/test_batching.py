"""Packing by hand, and what holds for any rollouts."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batching import TokenBatch, micro_batches, token_weights
from pipeline.datatypes import Completion, Rollout, RolloutName

PAD = 99


def rollout(
    number: int, prompt: int, new: int, *, advantage: float = 1.0, reward: float | None = 1.0
) -> Rollout:
    """Tokens say where they are: 100 * number + place; the log-prob is minus that."""
    places = 100 * number + np.arange(prompt + new, dtype=np.int32)
    completion = Completion(
        name=RolloutName("train", 0, prompt_id=number, sample=0),
        prompt_tokens=places[:prompt],
        tokens=places[prompt:],
        logprobs=-places[prompt:].astype(np.float32),
        stop_reason="eos",
        version=0,
        adapter_sha256="",
    )
    return Rollout(completion, "", {}, reward, advantage)


def pack(rollouts: list[Rollout], **changes: Any) -> list[TokenBatch]:
    settings: dict[str, Any] = {
        "rows": 2,
        "buckets": (4, 8, 12),
        "mode": "token",
        "pad": PAD,
        "keep_zero_advantage": False,
    }
    return micro_batches(rollouts, **(settings | changes))


def test_by_hand():
    rollouts = [
        rollout(1, 2, 1, advantage=0.5),
        rollout(2, 3, 4, advantage=-1.5),
        rollout(3, 1, 2, advantage=2.0),
    ]
    first, second = pack(rollouts)
    # The longest first: number 2 with 7 tokens, then 1 and 3 with 3 in the order of their names.
    assert [name.prompt_id for name in first.names] == [2, 1]
    np.testing.assert_array_equal(
        first.tokens,
        [
            [200, 201, 202, 203, 204, 205, 206, PAD],
            [100, 101, 102, PAD, PAD, PAD, PAD, PAD],
        ],
    )
    np.testing.assert_array_equal(
        first.targets,
        [
            [201, 202, 203, 204, 205, 206, PAD, PAD],
            [101, 102, PAD, PAD, PAD, PAD, PAD, PAD],
        ],
    )
    seventh = np.float32(1 / 7)
    np.testing.assert_array_equal(
        first.weights,
        [
            [0, 0, seventh, seventh, seventh, seventh, 0, 0],
            [0, seventh, 0, 0, 0, 0, 0, 0],
        ],
    )
    np.testing.assert_array_equal(
        first.sampled_logprobs,
        [
            [0, 0, -203, -204, -205, -206, 0, 0],
            [0, -102, 0, 0, 0, 0, 0, 0],
        ],
    )
    np.testing.assert_array_equal(first.advantages, [-1.5, 0.5])
    assert first.num_tokens == 5
    assert [name.prompt_id for name in second.names] == [3]
    np.testing.assert_array_equal(second.tokens, [[300, 301, 302, PAD], [PAD] * 4])
    np.testing.assert_array_equal(second.weights, [[seventh, seventh, 0, 0], [0] * 4])
    np.testing.assert_array_equal(second.advantages, [2.0, 0.0])
    assert [array.dtype for array in (first.tokens, first.targets)] == [np.int32] * 2
    assert first.weights.dtype == first.advantages.dtype == np.float32


def test_invariant_5_the_stop_token_has_a_weight():
    stopped = rollout(1, 3, 4)
    (batch,) = pack([stopped], rows=1)
    last = stopped.completion.tokens[-1]
    (place,) = np.flatnonzero(batch.targets[0] == last)
    assert batch.weights[0, place] == 0.25


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", [1 / 6, 1 / 6, 0, 1 / 6]),
        ("sequence", [1 / 3, 1 / 9, 0, 1 / 6]),
    ],
)
def test_weights_by_hand(mode: Literal["token", "sequence"], expected: list[float]):
    # The third has no reward, so it counts nowhere.
    rollouts = [rollout(0, 1, 1), rollout(1, 1, 3), rollout(2, 1, 5, reward=None), rollout(3, 1, 2)]
    np.testing.assert_allclose(token_weights(rollouts, mode), expected)


def test_a_step_without_any_reward_packs_nothing():
    assert token_weights([rollout(1, 1, 1, reward=None)], "token") == [0.0]
    assert pack([rollout(1, 1, 1, reward=None)]) == []
    assert pack([]) == []


def test_zero_advantages_are_left_out_but_count():
    rollouts = [rollout(1, 2, 1), rollout(2, 2, 3, advantage=0.0)]
    (left,) = pack(rollouts)
    assert [name.prompt_id for name in left.names] == [1]
    assert left.weights.sum() == 0.25
    (both,) = pack(rollouts, keep_zero_advantage=True)
    assert [name.prompt_id for name in both.names] == [2, 1]
    assert both.weights.sum() == 1.0


def test_a_length_that_fills_its_bucket_stays_in_it():
    assert pack([rollout(1, 4, 4)])[0].tokens.shape == (2, 8)
    assert pack([rollout(1, 4, 5)])[0].tokens.shape == (2, 12)


SIZES = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.integers(1, 6),
        st.sampled_from([-1.0, 0.0, 0.5]),
        st.sampled_from([None, 0.0, 1.0]),
    ),
    max_size=9,
)


@given(SIZES, st.integers(1, 4), st.sampled_from(["token", "sequence"]), st.booleans(), st.data())
def test_every_token_is_there_once_with_its_weight(
    sizes: Any, rows: int, mode: Any, keep: bool, data: st.DataObject
):
    rollouts = [
        rollout(number, prompt, new, advantage=advantage, reward=reward)
        for number, (prompt, new, advantage, reward) in enumerate(sizes, start=1)
    ]
    batches = pack(rollouts, rows=rows, mode=mode, keep_zero_advantage=keep)
    wanted = {
        token: (weight, rollout.advantage)
        for rollout, weight in zip(rollouts, token_weights(rollouts, mode), strict=True)
        for token in rollout.completion.tokens.tolist()
        if weight and (keep or rollout.advantage)
    }
    found = {}
    for batch in batches:
        for row, column in np.argwhere(batch.weights > 0):
            token = int(batch.targets[row, column])
            assert token not in found
            # It is predicted from the token before it, and keeps its log-prob.
            assert batch.tokens[row, column] == token - 1
            assert batch.sampled_logprobs[row, column] == -token
            found[token] = (float(batch.weights[row, column]), float(batch.advantages[row]))
        assert batch.tokens.shape[0] == rows
        assert batch.num_tokens == np.count_nonzero(batch.weights)
    assert found.keys() == wanted.keys()
    for token, expected in wanted.items():
        np.testing.assert_allclose(found[token], expected, rtol=1e-6)
    if wanted and (keep or all(r.advantage or r.reward is None for r in rollouts)):
        total = sum(batch.weights.sum() for batch in batches)
        np.testing.assert_allclose(total, 1.0, rtol=1e-5)
    # The order of the rollouts does not matter.
    again = pack(
        data.draw(st.permutations(rollouts)), rows=rows, mode=mode, keep_zero_advantage=keep
    )
    for one, two in zip(batches, again, strict=True):
        for field in dataclasses.fields(TokenBatch):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name))
