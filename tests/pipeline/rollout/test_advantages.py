"""Group advantages: values by hand, Tunix's values, and excluded rollouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.rollout.advantages import GroupStats, group_advantages

REWARDS = st.lists(
    st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.1, 1.0, 2.5])), min_size=4, max_size=4),
    min_size=1,
    max_size=5,
)


def test_grpo_by_hand():
    advantages, stats = group_advantages([[1, 0, 0, 0]], kind="grpo")
    # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, deviation 1/2
    np.testing.assert_allclose(advantages, [[1.5, -0.5, -0.5, -0.5]], atol=1e-5)
    assert advantages[0].dtype == np.float32
    assert stats == GroupStats(mixed=1, all_equal=0, short=0)


def test_rloo_by_hand():
    advantages, _ = group_advantages([[1, 0, 0, 0], [2, 4, 4, 2]], kind="rloo")
    # Each against the mean of the other three: 1 - 0, 0 - 1/3; 2 - 10/3, 4 - 8/3.
    third = 1 / 3
    expected = [[1.0, -third, -third, -third], [-4 / 3, 4 / 3, 4 / 3, -4 / 3]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    # With three rewards the others of the group are two.
    advantages, _ = group_advantages([[1, None, 0, 0]], kind="rloo")
    np.testing.assert_allclose(advantages, [[1, 0, -0.5, -0.5]])


def test_rollouts_without_a_reward_are_ignored():
    rewards: list[list[float | None]] = [
        [1, None, 0, 0, 0],
        [None, None, 3, None, None],
        [None, 1, 1, 1, 1],
        [None] * 5,
    ]
    advantages, stats = group_advantages(rewards, kind="grpo")
    np.testing.assert_allclose(advantages[0], [1.5, 0, -0.5, -0.5, -0.5], atol=1e-5)
    assert not np.concatenate(advantages[1:]).any()
    assert stats == GroupStats(mixed=1, all_equal=1, short=2)
    assert group_advantages([], kind="grpo") == ([], GroupStats(0, 0, 0))


def test_equal_rewards_give_exactly_zero():
    advantages, stats = group_advantages([[0.1] * 7], kind="grpo")
    assert not advantages[0].any()
    assert stats.all_equal == 1


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_differences_below_float32_are_no_signal(kind):
    advantages, stats = group_advantages([[5e-324, 0, 0, 0], [0.0, 1e-60, 0]], kind=kind)
    assert not np.concatenate(advantages).any()
    assert (stats.mixed, stats.all_equal) == (0, 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("grpo", "compute_advantages"),
        ("dr_grpo", "compute_drgrpo_advantages"),
        ("rloo", "compute_rloo_advantages"),
    ],
)
def test_values_equal_those_of_tunix(kind, name):
    algo_core = pytest.importorskip("tunix.rl.algo_core")
    rewards = np.random.default_rng(0).normal(size=(6, 8))
    rewards[2] = (rewards[2] > 0).astype(float)
    expected = getattr(algo_core, name)(rewards.reshape(-1), num_generations=8)
    advantages, _ = group_advantages(rewards.tolist(), kind=kind)
    np.testing.assert_allclose(np.concatenate(advantages), expected, atol=1e-5)


@given(REWARDS, st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_groups_are_centred_and_independent(rewards, kind):
    advantages, stats = group_advantages(rewards, kind=kind)
    np.testing.assert_allclose([group.sum() for group in advantages], 0, atol=1e-5)
    assert stats.mixed + stats.all_equal + stats.short == len(rewards)
    alone = [group_advantages([group], kind=kind)[0][0] for group in rewards]
    np.testing.assert_array_equal(advantages, alone)
    for group, values in zip(rewards, advantages, strict=True):
        for reward, value in zip(group, values, strict=True):
            assert reward is not None or value == 0
