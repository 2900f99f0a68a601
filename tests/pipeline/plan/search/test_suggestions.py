"""Suggested changes: what would gain most, what would make a plan fit, and their settings."""

from __future__ import annotations

import pytest

from configs.toml_text import show_value
from pipeline.plan.search.fitting import PlanCase, SizedPlan, choose_placement
from pipeline.plan.search.suggestions import suggestions
from tests.pipeline.plan.presets import FREE, case, choice, preset


def gains(given: PlanCase, plan: SizedPlan) -> dict[str, float]:
    return {one.text: one.gain(plan) for one in suggestions(given, plan)}


def test_planning_given_sizes_is_a_separate_change() -> None:
    left = next(one for one in choice("gemma3_1b", *FREE).compared if one.configured)
    change = "no plan.slots, no plan.micro_batch_tokens"
    given = case(preset("gemma3_1b", ("plan.slots", "8")))
    plan = next(one for one in choose_placement(given).compared if one.configured)
    expected = left.step.tokens_per_s / plan.step.tokens_per_s - 1
    found = gains(given, plan)
    assert next(iter(found)) == change
    assert found[change] == pytest.approx(expected)
    assert not any("slots" in text for text in gains(case(preset("gemma3_1b", *FREE)), left))


CAPPED = (("rollout.dynamic_sampling", "capped"), ("rollout.max_prompts_per_step", "96"))
SPLIT = (
    *FREE,
    ("plan.placement", "split"),
    ("plan.learner_devices", "4"),
    ("plan.samplers", "4"),
    ("learner.importance_cap", "2"),
    ("rollout.ahead", "one"),
)
CASES = [
    SPLIT,
    (*FREE, *CAPPED),
    (("plan.slots", "64"),),
    (("learner.teacher", "nowhere"), ("learner.distill_coef", "0.1"), ("learner.kl_top_k", "64")),
    (("rollout.top_k", "64"), ("rollout.top_p", "0.9")),
    (("plan.platform", "gpu"), ("plan.gpu", "h100"), ("plan.learner_devices", "1")),
]


@pytest.mark.parametrize("overrides", CASES)
def test_a_run_accepts_every_suggestion(overrides: tuple[tuple[str, str], ...]) -> None:
    given = case(preset("gemma3_1b", *overrides))
    found = suggestions(given, choose_placement(given).chosen)
    assert found
    tree = given.config.model_dump()
    for one in found:
        texts = {key: show_value(value) for key, value in one.settings.items()}
        assert preset("gemma3_1b", *overrides, *texts.items()) == one.case.config
        for key, value in one.settings.items():
            table, _, name = key.partition(".")
            assert tree[table][name] != value  # what is set already is not suggested


FOUR = "gemma3_4b"
TIGHT = (("plan.slots", "4096"), ("plan.hbm_gib", "5"))
TOO_LARGE = [
    ("v5e-1", (*FREE, ("plan.hbm_gib", "9")), ['model.quantization = "int8"', "lora.rank = 16"]),
    ("v5e-8", TIGHT, ['model.quantization = "nf4", ']),  # no single change is enough
]


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "overrides", "first"), TOO_LARGE)
def test_every_change_makes_the_plan_fit(
    topology: str, overrides: tuple[tuple[str, str], ...], first: list[str]
) -> None:
    given = case(preset(FOUR, *overrides), topology)
    plan = choose_placement(given).chosen
    assert not plan.fits
    found = suggestions(given, plan)
    for one, start in zip(found, first, strict=False):
        assert one.text.startswith(start)
    if overrides == TIGHT:
        (together,) = found
        assert together.settings["plan.slots"] is None
        assert together.settings["model.quantization"] == "nf4"
    for one in found:
        assert one.plan.fits
        assert one.plan.peak_bytes <= one.case.limit_bytes
        texts = {key: show_value(value) for key, value in one.settings.items()}
        again = case(preset(FOUR, *overrides, *texts.items()), topology)
        assert choose_placement(again).chosen.fits, one.text
