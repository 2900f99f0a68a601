"""Weighted sums, and the control experiment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rewards.base import Outcome
from rewards.weighting import combine, shuffle_rewards

DIED = Outcome.failed("died", "its process ended")


def parts(**values: float | None) -> dict[str, Outcome]:
    return {name: Outcome(value) for name, value in values.items()}


def test_promise_5_a_part_with_an_error_leaves_no_reward():
    weights = {"answer": 1.0, "format": 0.1}
    assert combine({**parts(answer=1.0), "format": DIED}, weights=weights) is None
    assert combine(parts(answer=1.0, format=2.0), weights=weights) == 1.2


def test_promise_5_a_part_that_does_not_apply_is_left_out_of_the_sum():
    weights = {"answer": 1.0, "format": 0.5}
    assert combine(parts(answer=None, format=2.0), weights=weights) == 1.0
    assert combine(parts(answer=None, format=None), weights=weights) is None


def test_a_part_of_weight_0_changes_nothing():
    weights = {"answer": 2.0, "seen": 0.0}
    for seen in (Outcome(None), DIED, Outcome(1e308), Outcome(-3.0)):
        assert combine({**parts(answer=0.5), "seen": seen}, weights=weights) == 1.0
    assert combine({"answer": DIED, **parts(seen=1.0)}, weights=weights) is None
    assert combine(parts(seen=1.0), weights={"seen": 0.0}) == 0.0


REWARDS = st.lists(st.one_of(st.none(), st.floats(-5, 5)), max_size=20)


@given(REWARDS, st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_shuffling_permutes_the_existing_rewards(rewards: list[float | None], seed: int, step: int):
    shuffled = shuffle_rewards(rewards, seed=seed, step=step)
    assert [r is None for r in shuffled] == [r is None for r in rewards]
    assert sorted(r for r in shuffled if r is not None) == sorted(
        r for r in rewards if r is not None
    )
    assert shuffle_rewards(rewards, seed=seed, step=step) == shuffled


def test_shuffles_differ_by_seed_and_step_and_not_by_machine():
    rewards = [float(n) for n in range(6)]
    shuffled = shuffle_rewards(rewards, seed=0, step=0)
    assert shuffled == [4.0, 5.0, 0.0, 3.0, 2.0, 1.0]
    assert shuffled != shuffle_rewards(rewards, seed=1, step=0)
    assert shuffled != shuffle_rewards(rewards, seed=0, step=1)
