"""Step times from measured speeds, computed by hand; neighbours of a size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import configs
from configs.load import load_config
from configs.schema import Config
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.speeds import Lengths, Speeds
from pipeline.plan.cost_model.workload import DecodeSchedule, decode_schedule
from pipeline.plan.size_choice import (
    SizeName,
    StepTimes,
    fastest_size,
    learning_s,
    neighbours,
    sampling_s,
    seconds_at,
)
from tests.pipeline.plan.presets import FREE, case, preset

ROW = 192


def demo(**changes: object) -> Config:
    settings = {"plan.fixed": "false", **{k.replace("__", "."): v for k, v in changes.items()}}
    path = Path(configs.__file__).parent / "demo.toml"
    return load_config(path, [(key, str(value)) for key, value in settings.items()])


def test_a_decode_schedule_refills_and_compacts_slots():
    # 2 slots: 8 and 16 tokens begin (2 and 4 segments); after 2 segments the third (1 segment)
    # takes the first slot; after it none waits, and the last one continues alone.
    turns = decode_schedule([8, 16, 4], sizes=(2, 1), segment_steps=4)
    assert turns == DecodeSchedule({2: 3, 1: 1}, fills=2, left={})


def test_seconds_are_interpolated_and_grow_beyond_the_largest_size():
    table = {8: 1.0, 16: 2.0, 32: 2.4}
    expected = {1: 1.0, 12: 1.5, 16: 2.0, 20: 2.1, 64: 4.8}
    assert {size: seconds_at(table, size) for size in expected} == pytest.approx(expected)


def test_sampling_is_the_sum_of_segments_fills_and_prefills():
    made = demo(
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
    speeds, lengths = Speeds("d", micro_batch_s={8: 1.0, 2: 0.3}), Lengths(30.0, 10.0)
    twice = {"learner__updates_per_batch": 2}
    # 192 sequences of 39 positions fill 41 rows of 192, padding included: five full micro-batches
    # and a small one of two rows, twice.
    apart = sized(demo(learner__share_prefix="false", **twice), Sizes(192, 8 * ROW))
    assert learning_s(apart, speeds, lengths) == pytest.approx(2 * (5 * 1.0 + 0.3))
    # With a prompt for each row and each group of 8 they have 15.4 each, which fill 16 rows.
    shared = sized(demo(learner__share_prefix="true", **twice), Sizes(192, 8 * ROW))
    assert learning_s(shared, speeds, lengths) == pytest.approx(2 * (2 * 1.0))


def test_the_smallest_of_equally_fast_sizes_is_chosen():
    assert fastest_size({64: 1.0, 32: 1.004, 16: 1.006}) == 32


def test_the_best_sizes_are_measured_allowed_and_fit():
    # 192 slots and 32 rows are upper bounds; without shared prompts a step fills the rows.
    given, lengths = case(demo(learner__share_prefix="false")), Lengths(20.0, 12.0)
    speeds = Speeds("d", {256: 0.1, 192: 1.0, 128: 2.0}, {1248: 0.1}, {192: 0.1})
    assert StepTimes.of(given, speeds, lengths).best is None  # no micro-batch was measured
    speeds |= Speeds(micro_batch_s={64: 0.1, 32: 1.0, 16: 9.0})
    times = StepTimes.of(given, speeds, lengths)
    assert times.best == Sizes(192, 32 * ROW)
    seconds = times.slots[192] + times.micro_batch_tokens[32 * ROW]
    assert times.seconds(Sizes(192, 32 * ROW)) == seconds
    assert times.seconds(Sizes(128, 8 * ROW)) is None
    assert times.tokens_per_s == pytest.approx(192 * 12 / seconds)
    # A size that ran out of memory is not chosen, even if a larger one compacted to it.
    less = StepTimes.of(given, speeds.limited({"slots": 191}), lengths)
    assert less.best == Sizes(128, 32 * ROW)


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        # Powers of two on each of 8 chips, next to the double and to the half.
        ("slots", 256, [512, 128]),
        ("slots", 28 * 8, [512, 128]),
        ("slots", 40, [64, 16]),
        ("slots", 8, [16]),
        # Not beyond the 512 rollouts of a step, nor the bound of the file.
        ("slots", 512, [256]),
        ("micro_batch_tokens", 2 * 8 * 2048, [8 * 2048]),
        ("micro_batch_tokens", 8 * 2048, [2 * 8 * 2048]),
    ],
)
def test_neighbours_are_about_twice_and_half_as_large(
    name: SizeName, sizes: int, expected: list[int]
):
    bounds = (("plan.slots", "none"), ("plan.micro_batch_tokens", str(2 * 8 * 2048)))
    given = case(
        preset("gemma3_1b", ("plan.fixed", "false"), *bounds, ("rollout.prompts_per_step", "32"))
    )
    own = replace(Sizes(64, 8 * 2048), **{name: sizes})
    found = neighbours(given, own, name)
    assert found == [replace(own, **{name: size}) for size in expected]


def test_larger_sizes_that_should_not_fit_are_no_neighbours():
    given = case(preset("gemma3_1b", *FREE))
    own = Sizes(512, 8 * 8 * 2048)
    assert len(neighbours(given, own, "micro_batch_tokens")) == 2
    tight = replace(given, memory_ratio={"update": 8.0, "score": 8.0})
    assert neighbours(tight, own, "micro_batch_tokens") == [Sizes(512, 4 * 8 * 2048)]
