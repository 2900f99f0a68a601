"""Lengths, slots and rows of a step and its times, computed by hand where possible."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.batching import Packing
from pipeline.plan.cost_model.step import StepEstimate, estimate_sampling, sft_step_s
from pipeline.plan.cost_model.workload import (
    completion_lengths,
    decode_schedule,
    mean_work,
    packed_positions,
)
from pipeline.plan.lengths import Lengths
from pipeline.plan.search.fitting import PlanCase
from pipeline.plan.sizes import with_plan
from tests.pipeline.plan.presets import case, preset


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


# --- times of a step, from the roofline times of its phases


POSITIONS = (246.4 + 159 * (1 / 16 + 246.4 / (2048 - 159))) / 0.97
"""Of a rollout in rows 97% full: its completion, and of its prompt a sixteenth, as that of a group,
and as much as its completion takes of a row, as that of a group's further rows."""
SPLIT = (
    *(("plan.placement", "split"), ("plan.samplers", "4"), ("plan.learner_devices", "4")),
    *(("plan.slots", "64"), ("plan.micro_batch_tokens", "8192"), ("learner.importance_cap", "2")),
)


@pytest.fixture
def one() -> PlanCase:
    return case(preset("gemma3_1b"))


def step_of(*overrides: tuple[str, str]) -> StepEstimate:
    found = case(preset("gemma3_1b", *overrides))
    return found.step(found.config)


def test_phases_and_micro_batches_add_up_to_the_step(one: PlanCase) -> None:
    step, pace = one.step(one.config), one.roofline(one.config)
    assert list(step.seconds) == ["prefill", "decode", "score", "update", "sync", "rewards"]
    assert step.total.expected == pytest.approx(sum(one.expected for one in step.seconds.values()))
    assert step.rollouts == 512
    assert step.tokens == pytest.approx(512 * 0.35 * 704)
    assert step.tokens_per_s == pytest.approx(step.tokens / step.total.expected)
    # 9 micro-batches of a row of 2,048 on each chip; see test_workload.
    packing = Packing.expected(one.config, one.lengths)
    assert packing.positions == pytest.approx(POSITIONS)
    assert packing.learned == pytest.approx(246.4 / POSITIONS)
    update = 9 * pace.gradient(2048, packing).expected + pace.apply().expected
    assert step.seconds["update"].expected == pytest.approx(update)
    assert step.seconds["score"].expected == pytest.approx(9 * pace.score(2048, packing).expected)
    twice = step_of(("learner.updates_per_batch", "2")).seconds["update"].expected
    assert twice == pytest.approx(2 * update)


def test_a_prompt_is_prefilled_once_per_group(one: PlanCase) -> None:
    pace = one.roofline(one.config)
    # Four prompts on each chip, in a bucket of 192; one prefill holds 21.
    few = estimate_sampling(pace, one.lengths, prompts=32, samples=16)
    assert few["prefill"].expected == pytest.approx(pace.prefill(21 * 192, seq=192).expected)
    many = estimate_sampling(pace, one.lengths, prompts=8 * 22, samples=16)
    assert many["prefill"].expected == pytest.approx(2 * few["prefill"].expected)


def test_a_split_placement_copies_the_adapter_and_may_sample_ahead(one: PlanCase) -> None:
    after, ahead = (step_of(*SPLIT, ("rollout.ahead", mode)) for mode in ("off", "one"))
    adapter = 4 * one.shape.adapter_parameters(one.config.lora)
    copied = after.seconds["sync"].expected - one.step(one.config).seconds["sync"].expected
    assert copied == pytest.approx(5 * adapter / 1e9)
    assert after.seconds == ahead.seconds
    s = {phase: time.expected for phase, time in after.seconds.items()}
    drawn, learned = s["prefill"] + s["decode"] + s["rewards"], s["score"] + s["update"]
    assert after.total.expected == pytest.approx(drawn + learned + s["sync"])
    assert ahead.total.expected == pytest.approx(max(drawn, learned) + s["sync"])


def test_an_sft_step_is_gradients_of_full_rows() -> None:
    sft = [("run.phases", '["sft", "grpo"]'), ("sft.train.path", "a.jsonl")]
    found = case(preset("gemma3_1b", *sft, ("sft.sequences_per_step", "16")))
    pace = found.roofline(found.config)
    # 16 rows of 2,048 are two micro-batches of 8.
    full = Packing(positions=1024.0, tokens=1024.0, learned=1.0, sequence=1024.0)
    expected = 2 * pace.gradient(2048, full).expected + pace.apply().expected
    assert sft_step_s(pace) == pytest.approx(expected)
