"""Lengths, slots and rows of a step, computed by hand where possible."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.speeds import Lengths
from pipeline.plan.cost_model.workload import (
    DecodeSchedule,
    completion_lengths,
    decode_schedule,
    expected_schedule,
    packed_positions,
)
from pipeline.plan.search.fitting import with_plan
from tests.pipeline.plan.presets import preset


def test_assumed_and_given_lengths() -> None:
    config = preset("gemma3_1b")  # prompts of at most 320, completions of at most 704
    assert Lengths.expected(config).prompt == 160.0
    assert Lengths.expected(config).completion == pytest.approx(246.4)
    assert Lengths.expected(config, 300.0).sequence == 460.0
    with pytest.raises(ValueError, match=r"--completion-tokens 705: must be from 1 to .* = 704"):
        Lengths.expected(config, 705)


@given(count=st.integers(2, 300), share=st.floats(0.1, 0.6), cap=st.integers(20, 2000))
def test_lengths_have_the_mean_and_stay_below_the_cap(count: int, share: float, cap: int) -> None:
    found = completion_lengths(count, mean=share * cap, cap=cap)
    assert len(found) == count
    assert min(found) >= 1
    assert max(found) <= cap
    assert mean(found) == pytest.approx(share * cap, abs=1.5 + cap / count)


def test_lengths_are_shuffled() -> None:
    found = completion_lengths(512, mean=250, cap=700)
    first, second = found[:256], found[256:]
    assert mean(first) == pytest.approx(mean(second), rel=0.1)


@pytest.mark.parametrize(
    ("lengths", "sizes", "segments"),
    [
        # Two slots: 10 and 30 begin, 20 follows the first at 10, all end at 30.
        ([10, 30, 20], (2,), {2: 3}),
        # With a smaller bucket: after 10 steps one slot runs, but 20 still waits for its slot.
        ([10, 30, 20], (2, 1), {2: 3}),
        ([10, 40], (2, 1), {2: 1, 1: 3}),
        # A started segment counts whole.
        ([11], (4, 2, 1), {1: 2}),
        ([10] * 8, (4, 2), {4: 2}),
    ],
)
def test_segments_by_slots(lengths: list[int], sizes: tuple[int, ...], segments: object) -> None:
    assert decode_schedule(lengths, sizes=sizes, segment_steps=10).segments == segments


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    slots=st.integers(1, 16),
    steps=st.integers(1, 16),
)
def test_every_token_has_a_slot(lengths: list[int], slots: int, steps: int) -> None:
    found = decode_schedule(lengths, sizes=(slots,), segment_steps=steps).segments
    needed = sum(-(-length // steps) for length in lengths)
    longest = max(-(-length // steps) for length in lengths)
    assert found[slots] * slots >= needed
    assert max(longest, -(-needed // slots)) <= found[slots] <= needed


def test_more_slots_take_fewer_segments_and_waste_more() -> None:
    lengths = completion_lengths(256, mean=250, cap=700)
    spent = [
        decode_schedule(lengths, sizes=(n,), segment_steps=32).segments[n] for n in (8, 16, 32, 64)
    ]
    assert spent == sorted(spent, reverse=True)
    wasted = [n * segments for n, segments in zip((8, 16, 32, 64), spent, strict=True)]
    assert wasted == sorted(wasted)


@pytest.mark.parametrize(
    ("lengths", "sizes", "segments"),
    [
        # 10 and 30 begin; 20 follows 10 on the first device, 10 the next slot that finishes.
        ([10, 30, 20, 10], (1,), {1: 4}),
        # Each device has one of 40 left after 10 steps.
        ([10, 10, 40, 40], (2, 1), {2: 1, 1: 3}),
        # One device has both long ones: nothing is compacted before it finishes one.
        ([10, 40, 10, 40], (2, 1), {2: 4}),
    ],
)
def test_the_fullest_device_decides(
    lengths: list[int], sizes: tuple[int, ...], segments: object
) -> None:
    assert decode_schedule(lengths, sizes=sizes, segment_steps=10, shards=2).segments == segments


@pytest.mark.parametrize(("count", "shards"), [(1, 1), (16, 2), (200, 4)])
@pytest.mark.parametrize("slots", [1, 8])
def test_the_expected_schedule_is_the_mean_over_many_steps(
    count: int, shards: int, slots: int
) -> None:
    sizes = tuple(dict.fromkeys((slots, max(1, slots // 2), 1)))
    found = expected_schedule(count, mean=90, cap=256, sizes=sizes, segment_steps=8, shards=shards)
    rng = np.random.default_rng(count)
    every = completion_lengths(4096, mean=90, cap=256)
    drawn = [rng.choice(every, count).tolist() for _ in range(10_000 // count)]
    steps = [decode_schedule(one, sizes=sizes, segment_steps=8, shards=shards) for one in drawn]

    def cost(turns: DecodeSchedule) -> float:
        """A segment takes a second, and another second per eight slots."""
        return sum(number * (1 + size / 8) for size, number in turns.segments.items())

    assert cost(found) == pytest.approx(np.mean([cost(turns) for turns in steps]), rel=0.03)
    assert found.fills == pytest.approx(np.mean([turns.fills for turns in steps]), rel=0.06)


def test_rows_are_packed_into_whole_micro_batches() -> None:
    config = preset("gemma3_1b")  # rows of 2,048, one on each of 8 chips
    # 512 x 406.4 tokens, and 5.3% of the positions empty: 107.3 rows, 13 x 8 and 4 more.
    assert packed_positions(config, Lengths(160, 246.4), sequences=512) == [8 * 2048] * 14
    double = with_plan(config, {"micro_batch_tokens": 2 * 16_384})
    assert packed_positions(double, Lengths(160, 246.4), sequences=512) == [32_768] * 7
