"""A step's times are the roofline times of its phases."""

from __future__ import annotations

import pytest

from pipeline.data.batching import Packing
from pipeline.plan.cost_model.step import StepEstimate, estimate_sampling, sft_step_s
from pipeline.plan.search.fitting import PlanCase
from tests.pipeline.plan.presets import case, preset

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
