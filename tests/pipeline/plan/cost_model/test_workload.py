"""Lengths, slots and rows of a step, computed by hand where possible."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.plan.cost_model.workload import (
    completion_lengths,
    decode_schedule,
    mean_work,
    packed_positions,
)
from pipeline.plan.lengths import Lengths
from pipeline.plan.sizes import with_plan
from tests.pipeline.plan.presets import preset


@given(count=st.integers(2, 300), share=st.floats(0.1, 0.6), cap=st.integers(20, 2000))
def test_lengths_have_the_mean_and_stay_below_the_cap(count: int, share: float, cap: int) -> None:
    found = completion_lengths(count, mean=share * cap, cap=cap)
    assert len(found) == count
    assert min(found) >= 1
    assert max(found) <= cap
    assert mean(found) == pytest.approx(share * cap, abs=1.5 + cap / count)


@pytest.mark.parametrize(
    ("lengths", "sizes", "settings", "segments", "left"),
    [
        # Two slots: 10 and 30 begin, 20 follows the first at 10, all end at 30.
        ([10, 30, 20], (2,), {}, {2: 3}, {}),
        # With a smaller bucket.
        ([10, 40], (2, 1), {}, {2: 1, 1: 3}, {}),
        # A started segment counts whole.
        ([11], (4, 2, 1), {}, {1: 2}, {}),
        # Two devices: 20 follows 10 on the first, 10 the next slot that finishes.
        ([10, 30, 20, 10], (1,), {"shards": 2}, {1: 4}, {}),
        # One device has both long ones: nothing is compacted before it finishes one.
        ([10, 40, 10, 40], (2, 1), {"shards": 2}, {2: 4}, {}),
        # A cut-off: 10 and 20 finish; the third one needs 10 more tokens.
        ([10, 30, 20], (3,), {"least": 2}, {3: 2}, {1: 10}),
        # One slot: the others have not begun.
        ([10, 10, 10], (1,), {"least": 1}, {1: 1}, {1: 10, 2: 10}),
    ],
)
def test_schedules_by_hand(
    lengths: list[int],
    sizes: tuple[int, ...],
    settings: dict[str, int],
    segments: dict[int, int],
    left: dict[int, int],
) -> None:
    found = decode_schedule(lengths, sizes=sizes, segment_steps=10, **settings)
    assert found == (segments, left)


@pytest.mark.parametrize(("count", "shards", "slots"), [(16, 2, 8), (200, 4, 1)])
def test_the_mean_work_is_that_of_many_steps(count: int, shards: int, slots: int) -> None:
    sizes = tuple(dict.fromkeys((slots, max(1, slots // 2), 1)))
    step = partial(mean_work, count, mean=90, cap=256, sizes=sizes, segment_steps=8, shards=shards)
    found = step(cut_off=None, keeps=False)
    rng = np.random.default_rng(count)
    every = completion_lengths(4096, mean=90, cap=256)
    drawn = [rng.choice(every, count).tolist() for _ in range(10_000 // count)]
    steps = [decode_schedule(one, sizes=sizes, segment_steps=8, shards=shards) for one in drawn]

    def cost(segments: Mapping[int, float]) -> float:
        """A segment takes a second, and another second per eight slots."""
        return sum(number * (1 + size / 8) for size, number in segments.items())

    assert cost(found.segments) == pytest.approx(
        np.mean([cost(segments) for segments, _ in steps]), rel=0.03
    )
    assert (found.trained, found.trained_tokens, found.continued) == (1, 1, 0)


def test_kept_rollouts_are_trained_once_and_others_generated_in_vain() -> None:
    step = partial(mean_work, 64, mean=90, cap=256, sizes=(64, 32, 16), segment_steps=8, shards=1)
    kept, dropped = (step(cut_off=0.75, keeps=keeps) for keeps in (True, False))
    assert (kept.trained, kept.trained_tokens) == pytest.approx((1, 1), abs=0.02)
    # At most a quarter of the requests is left, which are requested again beside 64 new ones.
    assert 0.8 * 64 / 3 < kept.continued <= 64 / 3
    assert 0 < kept.held_tokens < 256
    assert dropped.trained == pytest.approx(0.75, abs=0.02)  # several can finish in one segment
    assert dropped.continued == 0
    # The longest ones are dropped.
    assert dropped.trained_tokens < dropped.trained


def test_rows_are_packed_into_whole_micro_batches() -> None:
    # Rows of 2,048, one on each of 8 chips: 512 x 405.4 tokens, and 5.3% of the positions empty.
    # That is 107.03 rows, 13 x 8 and 4 more.
    # With shared prompts a rollout has 246.4 tokens and of its prompt's 159 a sixteenth and
    # 246.4 / (2048 - 159): 277.1, and 3% of the positions are empty. 71.4 rows are 9 x 8.
    batches = {
        "false": ([16_384] * 14, [32_768] * 7),
        "true": ([16_384] * 9, [32_768] * 4 + [16_384]),
    }
    for shared, (once, doubled) in batches.items():
        config = preset("gemma3_1b", ("learner.share_prefix", shared))
        twice = with_plan(config, {"micro_batch_tokens": 2 * 16_384})
        assert packed_positions(config, Lengths(160, 246.4), sequences=512) == once
        assert packed_positions(twice, Lengths(160, 246.4), sequences=512) == doubled
