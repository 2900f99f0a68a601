"""Group advantages: values by hand, Tunix's values, and excluded rollouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.rollout.advantages import group_advantages

KINDS = ("grpo", "dr_grpo", "rloo")
REWARDS = st.lists(
    st.one_of(st.none(), st.sampled_from([0.0, 0.1, 1.0, 2.5])), min_size=0, max_size=6
)
THIRD = 1 / 3


@pytest.mark.parametrize(
    ("kind", "rewards", "expected"),
    [
        # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, deviation 1/2
        ("grpo", [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ("grpo", [1, None, 0, 0, 0], [1.5, 0, -0.5, -0.5, -0.5]),
        ("dr_grpo", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        # Each against the mean of the others.
        ("rloo", [1, 0, 0, 0], [1, -THIRD, -THIRD, -THIRD]),
        ("rloo", [2, 4, 4, 2], [-4 / 3, 4 / 3, 4 / 3, -4 / 3]),
        ("rloo", [1, None, 0, 0], [1, 0, -0.5, -0.5]),
    ],
)
def test_advantages_by_hand(kind, rewards, expected):
    advantages = group_advantages(rewards, kind=kind)
    np.testing.assert_allclose(advantages, expected, atol=1e-5)
    assert advantages.dtype == np.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rewards", [[0.1] * 7, [None, None, 3, None], [None] * 5, [5e-324, 0, 0], [0.0, 1e-60, 0]]
)
def test_without_a_difference_in_float32_advantages_are_exactly_zero(kind, rewards):
    assert not group_advantages(rewards, kind=kind).any()


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
    advantages = [group_advantages(group, kind=kind) for group in rewards.tolist()]
    np.testing.assert_allclose(np.concatenate(advantages), expected, atol=1e-5)


@given(REWARDS, st.sampled_from(KINDS))
def test_groups_are_centred_and_rollouts_without_a_reward_are_ignored(rewards, kind):
    advantages = group_advantages(rewards, kind=kind)
    np.testing.assert_allclose(advantages.sum(), 0, atol=1e-5)
    known = [reward is not None for reward in rewards]
    alone = group_advantages([one for one in rewards if one is not None], kind=kind)
    np.testing.assert_array_equal(advantages[known], alone)
    assert not advantages[np.logical_not(known)].any()
