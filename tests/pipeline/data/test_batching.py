"""Packed batches: examples by hand, and properties of any rollouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.learner import TokenWeights
from pipeline.data.batching import (
    Packing,
    batches_to_learn,
    micro_batches,
    token_weights,
)
from pipeline.data.packed_batch import BatchShape, TokenBatch
from pipeline.plan.cost_model.workload import completion_lengths
from pipeline.plan.lengths import Lengths
from pipeline.types import NO_TEXT, Completion, Rollout, RolloutName, Segment
from tests.pipeline.plan.presets import preset
from tests.samples import make_config

PAD = 99
BUDGET = 10
MODES: tuple[TokenWeights, ...] = ("token", "sequence", "constant")


def rollout(
    number: int,
    prompt: int,
    new: int,
    *,
    sample: int = 0,
    advantage: float = 1.0,
    reward: float | None = 1.0,
    stop_reason: Any = "eos",
) -> Rollout:
    """Tokens encode their location: 100 * number + position; log-probs are their negatives.

    Those of a completion are 1000 * sample larger.
    """
    places = 100 * number + np.arange(prompt + new, dtype=np.int32)
    places[prompt:] += 1000 * sample
    completion = Completion(
        name=RolloutName("train", 0, prompt_id=number, sample=sample),
        prompt_tokens=places[:prompt],
        segments=(Segment(places[prompt:], -places[prompt:].astype(np.float32), 0, ""),),
        stop_reason=stop_reason,
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
    share: bool = False,
) -> list[TokenBatch]:
    return micro_batches(
        rollouts,
        shape=BatchShape(rows, tail_rows, length, pad=PAD, share_prefix=share),
        weights=token_weights(rollouts, mode, budget=BUDGET),
        keep_zero_advantage=keep,
    )


def test_segments_have_their_own_versions_weights_and_processed_logprobs():
    kept = np.array([-0.5, -0.25], np.float32)
    one = rollout(2, 2, 3)
    (whole,) = one.completion.segments
    head, tail = (
        replace(whole, tokens=whole.tokens[part], logprobs=whole.logprobs[part])
        for part in (slice(2), slice(2, None))
    )
    segments = (
        replace(head, version=3, loss_weight=0.0, processed_logprobs=kept),
        replace(tail, loss_weight=0.5),
    )
    split = replace(one, completion=replace(one.completion, segments=segments))
    (batch,) = pack([rollout(1, 2, 1), split])

    def row(array: np.ndarray) -> list[float]:
        return array[0, :6].tolist()

    assert row(batch.sampled_logprobs) == [0, -202, -203, -204, 0, -102]
    assert row(batch.processed_logprobs) == [0, -0.5, -0.25, -204, 0, -102]
    assert row(batch.versions) == [0, 3, 3, 0, 0, 0]
    assert (batch.weights[0, 3], batch.num_tokens) == (batch.weights[0, 5] / 2, 2)
    np.testing.assert_array_equal(batch.weights[0, :6] > 0, [0, 0, 0, 1, 0, 1])
    np.testing.assert_array_equal(batch.targets[0, 1:4], [202, 203, 204])


def test_promise_1_the_stop_token_has_a_weight():
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
    assert [name.prompt_id for name in batch.completions] == [1, 2]
    assert set(batch.weights[batch.weights > 0]) == {np.float32(1 / (2 * 28))}


@pytest.mark.parametrize(("group", "row"), [(16, 2048), (4, 1024)])
def test_the_expected_packing_is_near_that_of_drawn_lengths(group: int, row: int):
    config = preset(
        "gemma3_1b",
        ("rollout.group_size", str(group)),
        ("rollout.prompts_per_step", str(512 // group)),
        ("plan.row_tokens", str(row)),
        ("learner.share_prefix", "true"),
    )
    lengths = Lengths.expected(config)
    drawn = completion_lengths(512, mean=lengths.completion, cap=config.rollout.max_new_tokens)
    rollouts = [
        rollout(number // group, round(lengths.prompt), new, sample=number % group)
        for number, new in enumerate(drawn)
    ]
    batches = pack(rollouts, rows=1, length=row, share=True)
    positions = sum(batch.tokens.size for batch in batches)
    expected = Packing.expected(config, lengths)
    for found, wanted in (
        (positions / 512, expected.positions),
        ((positions - sum(batch.num_padded for batch in batches)) / 512, expected.tokens),
        (sum(batch.num_tokens for batch in batches) / positions, expected.learned),
    ):
        assert found == pytest.approx(wanted, rel=0.04)


GROUPS = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.lists(
            st.tuples(
                st.integers(1, 6),
                st.sampled_from([-1.0, 0.0, 0.5]),
                st.sampled_from([None, 0.0, 1.0]),
            ),
            min_size=1,
            max_size=5,
        ),
    ),
    max_size=6,
)
"""Tokens of a prompt, and for each of its completions tokens, advantage and reward."""


@given(GROUPS, st.integers(1, 4), st.sampled_from(MODES), st.booleans(), st.booleans(), st.data())
def test_every_token_is_packed_once_with_its_weight(
    groups: Any, rows: int, mode: TokenWeights, keep: bool, share: bool, data: st.DataObject
):
    rollouts = [
        rollout(number, prompt, new, sample=sample, advantage=advantage, reward=reward)
        for number, (prompt, samples) in enumerate(groups, start=1)
        for sample, (new, advantage, reward) in enumerate(samples)
    ]
    batches = pack(rollouts, rows=rows, mode=mode, keep=keep, share=share)
    weights = token_weights(rollouts, mode, budget=BUDGET)
    wanted = {
        token: (weight, rollout.advantage)
        for rollout, weight in zip(rollouts, weights, strict=True)
        for token in rollout.completion.tokens.tolist()
        if weight and (keep or rollout.advantage)
    }
    completions = {one.completion.name: one.completion for one in rollouts}
    found, filled = {}, list[int]()
    for batch in batches:
        assert batch.tokens.shape[1] == 12
        assert batch.tokens.shape[0] in {rows, 1}
        for name, place in batch.completions.items():
            completion, at = completions[name], (place.row, place.positions)
            np.testing.assert_array_equal(batch.targets[at], completion.tokens)
            np.testing.assert_array_equal(batch.sampled_logprobs[at], completion.logprobs)
            # The last target is predicted from the whole sequence before it, in its order.
            seen = _attended(batch, place.row, place.positions.stop - 1)
            whole = [*completion.prompt_tokens, *completion.tokens]
            assert batch.tokens[place.row, seen].tolist() == whole[:-1]
            assert batch.positions[place.row, seen].tolist() == [*range(len(whole) - 1)]
        for row, segments in enumerate(batch.segments):
            inside = [
                completions[name] for name, place in batch.completions.items() if place.row == row
            ]
            heads = {(one.name if not share else one.name.prompt_id): one for one in inside}
            used = sum(len(one.prompt_tokens) - 1 for one in heads.values())
            used += sum(len(one.tokens) for one in inside)
            assert np.count_nonzero(segments) == used
            filled.append(used)
        for at in zip(*np.nonzero(batch.weights), strict=True):
            token = int(batch.targets[at])
            assert token not in found
            found[token] = (float(batch.weights[at]), float(batch.advantages[at]))
    # What opened the later of two rows would have fit into the earlier one.
    assert sum(0 < 2 * used <= 12 for used in filled) <= 1
    assert found.keys() == wanted.keys()
    for token, expected in wanted.items():
        np.testing.assert_allclose(found[token], expected, rtol=1e-6)
    shuffled = data.draw(st.permutations(rollouts))
    again = pack(shuffled, rows=rows, mode=mode, keep=keep, share=share)
    for one, two in zip(batches, again, strict=True):
        np.testing.assert_equal(vars(one), vars(two))


def _attended(batch: TokenBatch, row: int, at: int) -> np.ndarray:
    """Indices of the positions that one attends to, itself included."""
    segments = batch.segments[row, : at + 1]
    own = segments == batch.segments[row, at]
    if batch.prefixes is not None:
        own |= segments == batch.prefixes[row, at]
    return np.flatnonzero(own)
