"""Estimates for a rehearsal's phases: the planner's seconds and bytes for that amount of work."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.rehearsal.expected import Expectations, Target
from pipeline.contracts.rollouts import DecodeWork
from pipeline.inputs.hub.model_shape import read_model_shape
from pipeline.plan.cost_model.hardware import TOPOLOGIES
from pipeline.plan.cost_model.memory import estimate_memory
from tests.fakes import make_config

SHAPE = read_model_shape({"model_type": "gemma3_text", "num_hidden_layers": 7})
ROW = 88
PLAN = {
    "platform": "gpu",
    "placement": "split",
    "slots": 16,
    "samplers": 2,
    "sampler_devices": 2,
    "learner_devices": 2,
    "micro_batch_tokens": 8 * ROW,
}


@pytest.fixture
def expected(tmp_path: Path) -> Expectations:
    config = make_config(tmp_path, plan=PLAN, learner={"kl_coef": 0.1, "updates_per_batch": 2})
    return Expectations.of(config, Target(SHAPE, TOPOLOGIES["gpu-80x8"]))


def test_sampling_counts_the_work_of_each_device(expected: Expectations):
    # Two samplers of two devices each: 16 slots are 8 on a device, 3 segments of each sampler.
    work = DecodeWork({16: 6}, slot_steps=0, tokens=0, prompt_tokens=4 * 40)
    model, steps = expected.model, expected.config.segment_steps
    segment = model.decode_step(8).expected * steps + model.flush(8).expected
    found = expected.sampling(work, seq=8)
    assert found.expected == pytest.approx(3 * segment + model.prefill(40, seq=8).expected)


def test_an_update_counts_micro_batches_references_and_updates(expected: Expectations):
    model = expected.model
    full, small = 4 * ROW, 1 * ROW  # of a device: half of 8 and of 2 rows
    assert expected.scoring(10).expected == pytest.approx(
        model.score(full, seq=ROW).expected + model.score(small, seq=ROW).expected
    )
    gradients = model.gradient(full, seq=ROW).expected + model.gradient(small, seq=ROW).expected
    assert expected.sft_update(10).expected == pytest.approx(gradients + model.apply().expected)
    assert expected.update(10).expected == pytest.approx(
        expected.scoring(10).expected + 2 * (gradients + model.apply().expected)
    )


def test_bytes_are_those_of_the_plans_phases(expected: Expectations):
    planned = estimate_memory(expected.config, SHAPE)
    assert expected.bytes_of(["segment 16"]) == planned["decode"].total
    assert expected.bytes_of(["prefill 8", "fill 8"]) == planned["prefill"].total
    assert expected.bytes_of(["gradient 8", "gradient 2"]) == planned["update"].total
    assert expected.bytes_of([]) is None
