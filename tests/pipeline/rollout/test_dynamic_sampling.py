"""Further rounds: their size, and the groups that are trained on, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.progress import SignalShare
from pipeline.rollout.dynamic_sampling import Group, choose, has_signal, round_size
from pipeline.types import NO_TEXT, Rollout, RolloutName, RolloutRequest
from tests.samples import completion


def test_older_groups_weigh_less():
    assert SignalShare(10, 40).faded() == SignalShare(9, 36)


def test_the_share_is_strictly_between_0_and_1():
    assert SignalShare().share == 0.5
    assert SignalShare().counted(0, 9).share == 0.05
    assert SignalShare().counted(9, 9).share == 0.95


def test_round_size_covers_the_missing_groups_up_to_the_limit():
    assert round_size(6, left=40, share=0.4) == 15
    assert round_size(6, left=10, share=0.4) == 10
    assert round_size(1, left=10, share=0.95) == 2


def group(number: int, *rewards: float | None) -> list[Rollout]:
    return [
        Rollout(
            completion(RolloutRequest(RolloutName("train", 0, number, n), np.zeros(1, np.int32))),
            NO_TEXT,
            {},
            reward,
            0.0,
        )
        for n, reward in enumerate(rewards)
    ]


def numbers(groups: Sequence[Group]) -> list[int]:
    return [members[0].completion.name.prompt_id for members in groups]


def test_signal_is_two_rewards_that_differ():
    assert has_signal(group(0, 1.0, None, 0.0))
    assert not has_signal(group(0, 1.0, None))
    assert not has_signal(group(0, 0.0, 0.0, None))
    assert not has_signal(group(0, None, None))


WITH, WITHOUT = (0.0, 1.0), (1.0, 1.0)


def test_the_first_groups_with_signal_are_kept():
    kinds = [WITHOUT, WITH, WITHOUT, WITH, WITH, WITHOUT, WITH]
    groups = [group(number, *kind) for number, kind in enumerate(kinds)]
    found = choose(groups, wanted=3)
    assert numbers(found.kept) == [1, 3, 4]
    assert numbers(found.replaced) == [0, 2, 5]
    assert numbers(found.surplus) == [6]


def test_missing_groups_are_filled_up_with_the_first_without_signal():
    kinds = [WITHOUT, WITH, WITHOUT, WITHOUT, WITH]
    found = choose([group(number, *kind) for number, kind in enumerate(kinds)], wanted=4)
    assert numbers(found.kept) == [0, 1, 2, 4]
    assert (numbers(found.replaced), found.surplus) == ([3], [])


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 12))
def test_every_group_is_kept_or_counted_and_signal_comes_first(kinds: list[bool], wanted: int):
    groups = [group(number, *(WITH if kind else WITHOUT)) for number, kind in enumerate(kinds)]
    found = choose(groups, wanted=wanted)
    parts = (found.kept, found.replaced, found.surplus)
    assert sorted(chain(*map(numbers, parts))) == list(range(len(kinds)))
    assert len(found.kept) == min(wanted, len(kinds))
    kept = sum(kinds[number] for number in numbers(found.kept))
    assert kept == min(wanted, sum(kinds))
    assert not any(kinds[number] for number in numbers(found.replaced))
