"""Step times from measured speeds, computed by hand; the size ladder and the choice of sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

import configs
from configs.load import load_config
from configs.schema import Config
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.speeds import Lengths, Speeds
from pipeline.inputs.hub.model_shape import shape_of
from pipeline.plan.cost_model.hardware import topology_of
from pipeline.plan.cost_model.measured_time import learning_s, sampling_s, seconds_at
from pipeline.plan.cost_model.workload import DecodeSchedule, decode_schedule
from pipeline.plan.search.fitting import PlanCase
from pipeline.plan.size_choice import (
    MAX_MULTIPLE,
    SizeLadder,
    choose_sizes,
    fastest_size,
    still_improves,
)

PRESETS = Path(configs.__file__).parent


def config(preset: str, **changes: object) -> Config:
    settings = {"plan.fixed": "false", **{k.replace("__", "."): v for k, v in changes.items()}}
    return load_config(PRESETS / f"{preset}.toml", [(k, str(v)) for k, v in settings.items()])


def test_a_decode_schedule_refills_and_compacts_slots():
    # 2 slots: 8 and 16 tokens begin (2 and 4 segments); after 2 segments the third (1 segment)
    # takes the first slot; after it none waits, and the last one continues alone.
    turns = decode_schedule([8, 16, 4], sizes=(2, 1), segment_steps=4)
    assert turns == DecodeSchedule({2: 3, 1: 1}, fills=2)
    assert decode_schedule([4] * 6, sizes=(2, 1), segment_steps=4) == DecodeSchedule(
        {2: 3}, fills=3
    )


def test_seconds_are_interpolated_and_grow_beyond_the_largest_size():
    table = {8: 1.0, 16: 2.0, 32: 2.4}
    assert seconds_at(table, 16) == 2.0
    assert seconds_at(table, 12) == pytest.approx(1.5)
    assert seconds_at(table, 20) == pytest.approx(2.1)
    assert seconds_at(table, 1) == 1.0
    assert seconds_at(table, 64) == pytest.approx(4.8)


def test_sampling_is_the_sum_of_segments_fills_and_prefills():
    made = config(
        "demo",
        plan__placement="colocated",
        plan__samplers="none",
        plan__sampler_devices="none",
        plan__learner_devices=2,
        rollout__prompts_per_step=2,
    )
    # 16 rollouts on two devices: 8 on each, all of 12 tokens, one segment.
    lengths = Lengths(prompt=52, completion=1.0)
    speeds = Speeds("d", {4: 0.5, 8: 0.7}, {52 * 2: 0.1, 52 * 4: 0.15}, {4: 0.01}, {})
    at_four = sized(made, Sizes(4, 384))
    # Two slots per device: four segments in sequence; each device prefills two prompts.
    assert sampling_s(at_four, speeds, lengths) == pytest.approx(4 * 0.5 + 4 * 0.01 + 0.15)
    at_eight = sized(made, Sizes(8, 384))
    # Prefills of four rows of 52 on each device were not measured: time grows with positions.
    prefill = 0.15 * (4 * 52 * 2) / (52 * 4)
    expected = 2 * 0.7 + 2 * (0.01 * 8 / 4) + prefill
    assert sampling_s(at_eight, speeds, lengths) == pytest.approx(expected)


def test_learning_is_the_sum_of_its_micro_batches():
    made = sized(config("demo", learner__updates_per_batch=2), Sizes(192, 8 * 192))
    speeds = Speeds("d", micro_batch_s={8: 1.0, 2: 0.3})
    # 192 sequences of 40 tokens fill 42 rows of 192 positions, padding included: five full
    # micro-batches and a small one of two rows, twice.
    lengths = Lengths(prompt=30, completion=10)
    assert learning_s(made, speeds, lengths) == pytest.approx(2 * (5 * 1.0 + 0.3))


def test_the_smallest_of_equally_fast_sizes_is_chosen():
    assert fastest_size({64: 1.0, 32: 1.004, 16: 1.006}) == 32
    assert fastest_size({64: 1.0}) == 64


def test_smaller_sizes_are_tried_until_two_do_not_help():
    sizes = (64, 32, 16, 8, 4)
    assert still_improves({}, sizes)
    assert still_improves({64: 1.0}, sizes)
    assert still_improves({64: 1.0, 32: 2.0}, sizes)
    assert not still_improves({64: 1.0, 32: 2.0, 16: 3.0}, sizes)
    assert still_improves({64: 1.0, 32: 0.5, 16: 3.0}, sizes)
    # The small last micro-batch, which is measured along, does not end the search.
    assert still_improves({64: 1.0, 4: 9.0, 32: 2.0}, sizes)


def test_a_choice_needs_slots_and_rows():
    made = config("demo", plan__slots="none", plan__micro_batch_tokens="none")
    ladder, lengths = SizeLadder((192, 128), (32, 16)), Lengths(20, 12)
    half = Speeds("d", {192: 1.0}, {1248: 0.1}, {192: 0.1})
    assert choose_sizes(made, ladder, half, lengths) is None
    whole = Speeds("d", {192: 1.0}, {1248: 0.1}, {192: 0.1}, {32: 1.0, 16: 9.0})
    choice = choose_sizes(made, ladder, whole, lengths)
    assert choice is not None
    assert choice.sizes == Sizes(192, 32 * 192)
    seconds = choice.sampling_s[192] + choice.learning_s[32]
    assert choice.seconds(192, 32) == seconds
    assert choice.seconds(128, 32) is None
    assert choice.tokens_per_s == pytest.approx(192 * 12 / seconds)
    # A size that ran out of memory is not chosen, even if a larger one compacted to it.
    assert choose_sizes(made, ladder, whole.with_full(slots=192), lengths) is None


@pytest.mark.parametrize(
    ("slots", "expected"), [(512, (512, 256, 128, 64, 32, 16, 8)), (100, (96, 64, 32, 16, 8))]
)
def test_the_ladder_of_a_step_of_512_on_8_chips(slots: int, expected: tuple[int, ...]):
    made = config("gemma3_1b_gsm8k_v5e8", rollout__prompts_per_step=64, plan__slots=slots // 8 * 8)
    lengths = Lengths.expected(made)
    case = PlanCase(made, shape_of(made), topology_of(made, None), lengths)
    ladder = SizeLadder.of(case, Sizes.of(made))
    assert ladder.slots == expected
    assert ladder.rows[0] * made.row_tokens <= (made.plan.micro_batch_tokens or 0)
    assert all(rows % 8 == 0 for rows in ladder.rows)


def test_sizes_that_should_not_fit_are_not_tried():
    made = config(
        "gemma3_1b_gsm8k_v5e8",
        plan__micro_batch_tokens="none",
        plan__slots="none",
        plan__remat="full",
    )
    case = PlanCase(made, shape_of(made), topology_of(made, None), Lengths.expected(made))
    planned = Sizes(512, 2 * 8 * made.row_tokens)
    ladder = SizeLadder.of(case, planned)
    assert ladder.top(made).micro_batch_tokens <= MAX_MULTIPLE * planned.micro_batch_tokens
    less = PlanCase(
        made.model_copy(update={"plan": made.plan.model_copy(update={"hbm_gib": None})}),
        case.shape,
        topology_of(made, None),
        case.lengths,
        {"update": 8.0, "score": 8.0},
    )
    assert SizeLadder.of(less, planned).rows[0] < ladder.rows[0]
