"""Packed batches: examples by hand, and properties of any rollouts."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.learner import TokenWeights
from pipeline.contracts.batches import BatchShape, TokenBatch
from pipeline.contracts.rollouts import NO_TEXT, Completion, Rollout, RolloutName, VersionSpan
from pipeline.inputs.dataset.batching import (
    batches_to_learn,
    batches_to_score,
    micro_batches,
    token_weights,
)
from tests.fakes import make_config

PAD = 99
BUDGET = 10
MODES: tuple[TokenWeights, ...] = ("token", "sequence", "constant")


def rollout(
    number: int,
    prompt: int,
    new: int,
    *,
    advantage: float = 1.0,
    reward: float | None = 1.0,
    stop_reason: Any = "eos",
) -> Rollout:
    """Tokens encode their location: 100 * number + position; log-probs are their negatives."""
    places = 100 * number + np.arange(prompt + new, dtype=np.int32)
    completion = Completion(
        name=RolloutName("train", 0, prompt_id=number, sample=0),
        prompt_tokens=places[:prompt],
        tokens=places[prompt:],
        logprobs=-places[prompt:].astype(np.float32),
        stop_reason=stop_reason,
        version=0,
        adapter_sha256="",
    )
    return Rollout(completion, NO_TEXT, {}, reward, advantage)


def pack(
    rollouts: list[Rollout],
    *,
    rows: int = 2,
    tail_rows: int = 1,
    length: int = 12,
    mode: TokenWeights = "token",
    keep: bool = False,
) -> list[TokenBatch]:
    return micro_batches(
        rollouts,
        shape=BatchShape(rows=rows, tail_rows=tail_rows, length=length, pad=PAD),
        weights=token_weights(rollouts, mode, budget=BUDGET),
        keep_zero_advantage=keep,
    )


def ids(batch: TokenBatch) -> list[int]:
    return [name.prompt_id for name in batch.completions]


def test_micro_batches_by_hand():
    rollouts = [
        rollout(1, 2, 1, advantage=0.5),
        rollout(2, 3, 4, advantage=-1.5),
        rollout(3, 1, 2, advantage=2.0),
        rollout(4, 5, 2, advantage=1.0),
        rollout(5, 2, 1, advantage=1.0),
    ]
    first, second = pack(rollouts, length=10)
    # The longest first, equal ones in the order of their names: 2 and 4 have 7 tokens, 1, 3 and 5
    # have 3. A row of 10 takes one of each; the small remainder goes into a small micro-batch.
    assert [ids(first), ids(second)] == [[2, 1, 4, 3], [5]]
    np.testing.assert_array_equal(
        first.tokens,
        [
            [200, 201, 202, 203, 204, 205, 206, 100, 101, 102],
            [400, 401, 402, 403, 404, 405, 406, 300, 301, 302],
        ],
    )
    np.testing.assert_array_equal(
        first.targets,
        [
            [201, 202, 203, 204, 205, 206, PAD, 101, 102, PAD],
            [401, 402, 403, 404, 405, 406, PAD, 301, 302, PAD],
        ],
    )
    np.testing.assert_array_equal(first.segments, [[1] * 7 + [2] * 3] * 2)
    np.testing.assert_array_equal(first.positions, [[*range(7), *range(3)]] * 2)
    w = np.float32(1 / 10)
    np.testing.assert_array_equal(
        first.weights,
        [[0, 0, w, w, w, w, 0, 0, w, 0], [0, 0, 0, 0, w, w, 0, w, w, 0]],
    )
    np.testing.assert_array_equal(
        first.advantages,
        [
            [0, 0, -1.5, -1.5, -1.5, -1.5, 0, 0, 0.5, 0],
            [0, 0, 0, 0, 1, 1, 0, 2, 2, 0],
        ],
    )
    np.testing.assert_array_equal(
        first.sampled_logprobs,
        [
            [0, 0, -203, -204, -205, -206, 0, 0, -102, 0],
            [0, 0, 0, 0, -405, -406, 0, -301, -302, 0],
        ],
    )
    np.testing.assert_array_equal(first.processed_logprobs, first.sampled_logprobs)
    np.testing.assert_array_equal(second.tokens, [[500, 501, 502] + [PAD] * 7])
    np.testing.assert_array_equal(second.segments, [[1] * 3 + [0] * 7])
    assert (first.num_tokens, first.num_padded) == (9, 0)
    assert (second.num_tokens, second.num_padded) == (1, 7)
    assert [array.dtype for array in (first.tokens, first.targets)] == [np.int32] * 2
    assert first.weights.dtype == first.advantages.dtype == np.float32


def test_processed_logprobs_are_stored_beside_those_of_the_full_distribution():
    whole, other = rollout(1, 2, 1), rollout(2, 2, 2)
    kept = np.array([-0.5, -0.25], np.float32)
    cut = replace(other, completion=replace(other.completion, processed_logprobs=kept))
    (batch,) = pack([whole, cut])
    np.testing.assert_array_equal(
        batch.sampled_logprobs, [[0, -202, -203, 0, 0, -102, 0, 0, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        batch.processed_logprobs, [[0, -0.5, -0.25, 0, 0, -102, 0, 0, 0, 0, 0, 0]]
    )


def test_each_target_has_the_version_that_sampled_it():
    first, second = rollout(1, 2, 1), rollout(2, 2, 3)
    earlier = (VersionSpan(3, "", 2),)
    second = replace(
        second, completion=replace(second.completion, version=4, earlier_spans=earlier)
    )
    (batch,) = pack([first, second])
    np.testing.assert_array_equal(batch.versions, [[0, 3, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0]])


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
        # Three rollouts of at most 10 tokens.
        ("constant", [1 / 30, 1 / 30, 0, 1 / 30]),
    ],
)
def test_weights_by_hand(mode: TokenWeights, expected: list[float]):
    # The third has no reward, so it is excluded.
    rollouts = [rollout(0, 1, 1), rollout(1, 1, 3), rollout(2, 1, 5, reward=None), rollout(3, 1, 2)]
    np.testing.assert_allclose(token_weights(rollouts, mode, budget=BUDGET), expected)


def test_rollouts_truncated_by_length_can_be_masked():
    rollouts = [rollout(0, 1, 1), rollout(1, 1, 3), rollout(2, 1, 5, stop_reason="length")]
    learned = token_weights(rollouts, "token", budget=BUDGET)
    np.testing.assert_allclose(learned, [1 / 9] * 3)
    masked = token_weights(rollouts, "token", budget=BUDGET, mask_overlong=True)
    np.testing.assert_allclose(masked, [1 / 4, 1 / 4, 0])
    ended = [*rollouts, rollout(3, 1, 4, stop_reason="stop_string")]
    masked = token_weights(ended, "token", budget=BUDGET, mask_overlong=True)
    np.testing.assert_allclose(masked, [1 / 8, 1 / 8, 0, 1 / 8])


def test_batches_to_learn_use_the_configured_weights(tmp_path: Path):
    # Dr. GRPO divides by the budget of 28 tokens; one of three rollouts was truncated.
    config = make_config(
        tmp_path,
        rollout={"prompts_per_step": 2, "max_prompt_tokens": 14, "max_new_tokens": 28},
        learner={"loss": "dr_grpo", "overlong": "mask"},
    )
    rollouts = [rollout(1, 2, 5), rollout(2, 2, 3), rollout(3, 2, 9, stop_reason="length")]
    (batch,) = batches_to_learn(
        rollouts, config=config, shape=BatchShape(1, 1, 42, PAD), keep_zero_advantage=False
    )
    assert ids(batch) == [1, 2]
    assert set(batch.weights[batch.weights > 0]) == {np.float32(1 / (2 * 28))}
    learned = config.model_copy(
        update={"learner": config.learner.model_copy(update={"overlong": "learn"})}
    )
    (batch,) = batches_to_learn(
        rollouts, config=learned, shape=BatchShape(1, 1, 42, PAD), keep_zero_advantage=False
    )
    assert ids(batch) == [3, 1, 2]


def test_a_step_without_any_reward_packs_nothing():
    lost = [rollout(1, 1, 1, reward=None)]
    for mode in MODES:
        assert token_weights(lost, mode, budget=BUDGET) == [0.0]
    assert pack(lost) == []
    assert pack([]) == []


def test_rollouts_with_zero_advantage_are_omitted_but_count_in_the_weights():
    rollouts = [rollout(1, 2, 1), rollout(2, 2, 3, advantage=0.0)]
    (left,) = pack(rollouts)
    assert ids(left) == [1]
    assert left.weights.sum() == 0.25
    (both,) = pack(rollouts, keep=True)
    assert ids(both) == [2, 1]
    assert both.weights.sum() == 1.0


def test_batches_to_score_locate_each_completion():
    rollouts = [rollout(1, 2, 3), rollout(2, 4, 1), rollout(3, 1, 6)]
    completions = [one.completion for one in rollouts]
    shape = BatchShape(rows=1, tail_rows=1, length=12, pad=PAD)
    batches = batches_to_score(completions, shape=shape)
    found = {
        name: batch.targets[place.row, place.positions]
        for batch in batches
        for name, place in batch.completions.items()
    }
    assert len(found) == 3
    for completion in completions:
        np.testing.assert_array_equal(found[completion.name], completion.tokens)


SIZES = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.integers(1, 6),
        st.sampled_from([-1.0, 0.0, 0.5]),
        st.sampled_from([None, 0.0, 1.0]),
    ),
    max_size=9,
)


@given(SIZES, st.integers(1, 4), st.sampled_from(MODES), st.booleans(), st.data())
def test_every_token_is_packed_once_with_its_weight(
    sizes: Any, rows: int, mode: TokenWeights, keep: bool, data: st.DataObject
):
    rollouts = [
        rollout(number, prompt, new, advantage=advantage, reward=reward)
        for number, (prompt, new, advantage, reward) in enumerate(sizes, start=1)
    ]
    batches = pack(rollouts, rows=rows, mode=mode, keep=keep)
    weights = token_weights(rollouts, mode, budget=BUDGET)
    wanted = {
        token: (weight, rollout.advantage)
        for rollout, weight in zip(rollouts, weights, strict=True)
        for token in rollout.completion.tokens.tolist()
        if weight and (keep or rollout.advantage)
    }
    found = {}
    for batch in batches:
        for at in zip(*np.nonzero(batch.weights), strict=True):
            token = int(batch.targets[at])
            assert token not in found
            # The stop token is predicted from the token before it, and keeps its log-prob.
            assert batch.tokens[at] == token - 1
            assert batch.sampled_logprobs[at] == -token
            # The last two digits are the token's position in its rollout.
            assert batch.positions[at] == (token - 1) % 100
            found[token] = (float(batch.weights[at]), float(batch.advantages[at]))
        assert batch.tokens.shape[1] == 12
        assert batch.tokens.shape[0] in {rows, 1}
    assert found.keys() == wanted.keys()
    for token, expected in wanted.items():
        np.testing.assert_allclose(found[token], expected, rtol=1e-6)
    _same(batches, pack(data.draw(st.permutations(rollouts)), rows=rows, mode=mode, keep=keep))


def _same(batches: list[TokenBatch], again: list[TokenBatch]) -> None:
    """The order of the rollouts does not matter."""
    for one, two in zip(batches, again, strict=True):
        assert one.completions == two.completions
        for field in dataclasses.fields(TokenBatch):
            if field.name != "places":
                np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name))
