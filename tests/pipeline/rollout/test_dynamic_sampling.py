"""Further rounds: their size, their gain, and the groups that are trained on, by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.progress import LinearFit, SamplingEstimates
from pipeline.contracts.rollouts import Rollout, RolloutName, RolloutRequest
from pipeline.rollout.dynamic_sampling import Group, choose, gain, has_signal, round_size
from tests.fakes import completion


def line(*points: tuple[float, float]) -> LinearFit:
    found = LinearFit()
    for count, seconds in points:
        found = found.observed(count, seconds)
    return found


def test_a_line_goes_through_two_points():
    found = line((10, 7.0), (30, 17.0))
    assert [found.at(n) for n in (0, 10, 20, 50)] == pytest.approx([2, 7, 12, 27])


def test_a_line_fits_by_least_squares():
    counts, seconds = [4, 8, 8, 24, 11], [3.0, 5.5, 4.0, 11.0, 6.5]
    slope, start = np.polyfit(counts, seconds, 1)
    found = line(*zip(counts, seconds, strict=True))
    assert found.at(17) == pytest.approx(start + slope * 17)


def test_with_a_single_count_only_larger_counts_scale():
    found = line((24, 10.0), (24, 12.0))
    assert [found.at(n) for n in (0, 6, 24, 48)] == pytest.approx([11, 11, 11, 22])
    assert line((0, 3.0)).at(5) == 3.0


def test_intercept_and_slope_are_not_negative():
    falling = line((10, 9.0), (20, 5.0))
    assert falling.at(0) == falling.at(40) == 7.0
    steep = line((10, 1.0), (20, 9.0))
    assert steep.at(0) == pytest.approx(0.0)
    assert steep.at(30) == pytest.approx(10.0)


def test_older_observations_weigh_less():
    found = line((24, 10.0)).faded().observed(24, 20.0)
    assert found.at(24) == pytest.approx((0.9 * 10 + 20) / 1.9)
    estimates = SamplingEstimates(10, 40, line((1, 1.0)), line((2, 2.0))).faded()
    assert (estimates.signal, estimates.groups) == (9, 36)
    assert estimates.learning == line((2, 2.0)).faded()


def test_the_share_is_strictly_between_0_and_1():
    assert SamplingEstimates().share == 0.5
    assert SamplingEstimates().counted(0, 9).share == 0.05
    assert SamplingEstimates().counted(9, 9).share == 0.95


def test_estimates_round_trip_through_json_bit_for_bit():
    estimates = SamplingEstimates(0.1, 1 / 3, line((24, 0.7), (3, 0.1)).faded(), line((5, 1e-9)))
    assert SamplingEstimates.of_json(json.loads(json.dumps(estimates.to_json()))) == estimates


def test_round_size_covers_the_missing_groups_up_to_the_limit():
    assert round_size(6, left=40, share=0.4) == 15
    assert round_size(6, left=10, share=0.4) == 10
    assert round_size(1, left=10, share=0.95) == 2


MEASURED = SamplingEstimates(
    signal=11.5,
    groups=29,  # a share of 0.4
    sampling=line((10, 4.0), (20, 5.0)),  # 3 + 0.1 n
    learning=line((4, 10.0), (8, 14.0)),  # 6 + g
)


def test_the_gain_by_hand():
    found = gain(MEASURED, prompts=10, signal=2, wanted=6, prompts_per_step=20)
    assert found is not None
    # 4 of 10 in 4 s of sampling and 4 s of learning; 8 of 20 in 5 + 14 s.
    assert found.sampling == pytest.approx(4 / 8)
    assert found.learning == pytest.approx(8 / 19)
    # Only one group is missing: 1 in 4 + 1 s.
    one = gain(MEASURED, prompts=10, signal=7, wanted=1, prompts_per_step=20)
    assert one is not None
    assert one.sampling == pytest.approx(1 / 5)
    assert one.learning == pytest.approx(8 / 19)


def test_there_is_no_comparison_before_both_sides_were_measured():
    for lacking in (
        replace(MEASURED, sampling=LinearFit()),
        replace(MEASURED, learning=LinearFit()),
    ):
        assert gain(lacking, prompts=9, signal=0, wanted=9, prompts_per_step=9) is None


def group(number: int, *rewards: float | None) -> list[Rollout]:
    return [
        Rollout(
            completion(RolloutRequest(RolloutName("train", 0, number, n), np.zeros(1, np.int32))),
            "",
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
