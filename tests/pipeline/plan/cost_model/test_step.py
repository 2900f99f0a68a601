"""A step's times are the roofline times of its phases."""

from __future__ import annotations

import pytest

from pipeline.data.batching import Packing
from pipeline.plan.cost_model.step import PHASES, estimate_sampling, sft_step_s
from pipeline.plan.search.fitting import PlanCase
from tests.pipeline.plan.presets import case, preset

POSITIONS = (246.4 + 159 * (1 / 16 + 246.4 / (2048 - 159))) / 0.97
"""Of a rollout in rows 97% full: its completion, and of its prompt a sixteenth, as that of a group,
and as much as its completion takes of a row, as that of a group's further rows."""


@pytest.fixture
def one() -> PlanCase:
    return case(preset("gemma3_1b"))


def test_phases_add_up_to_the_step(one: PlanCase) -> None:
    step = one.step(one.config)
    assert tuple(step.seconds) == PHASES
    for end in ("low", "expected", "high"):
        assert getattr(step.total, end) == pytest.approx(
            sum(getattr(step.seconds[phase], end) for phase in PHASES)
        )
    assert step.rollouts == 512
    assert step.tokens == pytest.approx(512 * 0.35 * 704)
    assert step.tokens_per_s == pytest.approx(step.tokens / step.total.expected)


def test_learning_is_the_sum_of_its_micro_batches(one: PlanCase) -> None:
    step, pace = one.step(one.config), one.roofline(one.config)
    # 9 micro-batches of a row of 2,048 on each chip; see test_workload.
    packing = Packing.expected(one.config, one.lengths)
    assert packing.positions == pytest.approx(POSITIONS)
    assert packing.learned == pytest.approx(246.4 / POSITIONS)
    gradient = pace.gradient(2048, packing).expected
    assert step.seconds["update"].expected == pytest.approx(9 * gradient + pace.apply().expected)
    assert step.seconds["score"].expected == pytest.approx(9 * pace.score(2048, packing).expected)
    assert step.padding == pytest.approx(1 - 512 * 0.97 * POSITIONS / (9 * 16_384))


def test_each_update_on_the_same_rollouts_counts(one: PlanCase) -> None:
    twice = case(preset("gemma3_1b", ("learner.updates_per_batch", "2")))
    first, second = (c.step(c.config).seconds["update"].expected for c in (one, twice))
    assert second == pytest.approx(2 * first)


def test_further_prompts_of_a_step_raise_the_high_end_of_sampling(one: PlanCase) -> None:
    more = (("rollout.dynamic_sampling", "capped"), ("rollout.max_prompts_per_step", "96"))
    dynamic = case(preset("gemma3_1b", *more))
    config = dynamic.config
    off, on = one.step(one.config), dynamic.step(config)
    whole = estimate_sampling(dynamic.roofline(config), one.lengths, prompts=96, samples=16)
    for phase, most in whole.items():
        assert on.seconds[phase].expected == off.seconds[phase].expected
        assert on.seconds[phase].high >= most.high
        assert on.seconds[phase].high > 1.5 * off.seconds[phase].high
    assert on.seconds["rewards"].high > 2 * off.seconds["rewards"].high
    for phase in ("score", "update", "sync"):
        assert on.seconds[phase] == off.seconds[phase]
    assert on.total.expected == off.total.expected
    assert on.total.high > off.total.high


def test_a_prompt_is_prefilled_once_per_group(one: PlanCase) -> None:
    pace = one.roofline(one.config)
    # Four prompts on each chip, in a bucket of 192; one prefill holds 21.
    few = estimate_sampling(pace, one.lengths, prompts=32, samples=16)
    assert few["prefill"].expected == pytest.approx(pace.prefill(21 * 192, seq=192).expected)
    many = estimate_sampling(pace, one.lengths, prompts=8 * 22, samples=16)
    assert many["prefill"].expected == pytest.approx(2 * few["prefill"].expected)


def test_a_split_placement_copies_the_adapter() -> None:
    split = (("plan.placement", "split"), ("plan.samplers", "4"), ("plan.learner_devices", "4"))
    sizes = (("plan.slots", "64"), ("plan.micro_batch_tokens", "8192"))
    there, here = case(preset("gemma3_1b", *split, *sizes)), case(preset("gemma3_1b"))
    adapter = 4 * here.shape.adapter_parameters(here.config.lora)
    moved = there.step(there.config).seconds["sync"].expected
    assert moved - here.step(here.config).seconds["sync"].expected == pytest.approx(
        5 * adapter / 1e9
    )


def test_with_ahead_a_step_takes_the_longer_of_sampling_and_learning() -> None:
    split = [("plan.placement", "split"), ("plan.samplers", "4"), ("plan.learner_devices", "4")]
    split += [("plan.slots", "64"), ("plan.micro_batch_tokens", "8192")]
    split += [("learner.importance_cap", "2.0")]
    after, ahead = (
        case(preset("gemma3_1b", *split, ("rollout.ahead", mode))) for mode in ("off", "one")
    )
    one, two = after.step(after.config), ahead.step(ahead.config)
    assert one.seconds == two.seconds
    s = {phase: one.seconds[phase].expected for phase in PHASES}
    drawn, learned = s["prefill"] + s["decode"] + s["rewards"], s["score"] + s["update"]
    assert one.total.expected == pytest.approx(drawn + learned + s["sync"])
    assert two.total.expected == pytest.approx(max(drawn, learned) + s["sync"])


def test_an_sft_step_is_gradients_of_full_rows() -> None:
    sft = [("run.phases", '["sft", "grpo"]'), ("sft.train.path", "a.jsonl")]
    found = case(preset("gemma3_1b", *sft, ("sft.sequences_per_step", "16")))
    pace = found.roofline(found.config)
    # 16 rows of 2,048 are two micro-batches of 8.
    full = Packing(positions=1024.0, tokens=1024.0, learned=1.0, sequence=1024.0)
    expected = 2 * pace.gradient(2048, full).expected + pace.apply().expected
    assert sft_step_s(pace).expected == pytest.approx(expected)
