"""Further rounds: their size, and the groups that are trained on, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.rollout.dynamic_sampling import Group, choose, has_signal, round_size
from pipeline.types import NO_TEXT, Rollout, RolloutName, RolloutRequest
from tests.samples import completion


def test_round_size_covers_the_missing_groups_up_to_the_limit():
    assert round_size(6, left=40, signal=3, groups=9) == 18
    assert round_size(6, left=10, signal=3, groups=9) == 10
    assert round_size(6, left=999, signal=0, groups=9) == 120
    assert round_size(1, left=10, signal=9, groups=9) == 2


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


def test_the_first_groups_with_signal_are_kept_and_filled_up_with_the_first_without():
    kinds = [WITHOUT, WITH, WITHOUT, WITH, WITH, WITHOUT, WITH]
    groups = [group(number, *kind) for number, kind in enumerate(kinds)]
    assert numbers(choose(groups, wanted=3)) == [1, 3, 4]
    assert numbers(choose(groups[:5], wanted=4)) == [0, 1, 3, 4]
