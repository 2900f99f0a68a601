"""Suggested changes: what would gain most, what would make a plan fit, and their settings."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

import pytest

from configs.load import load_config
from configs.toml_text import show_value
from pipeline.plan.search.fitting import PlanCase, SizedPlan, choose_placement, plan_again
from pipeline.plan.search.suggestions import suggestions
from tests.pipeline.plan.presets import FREE, PROJECT, case, choice, preset

TWICE = {
    "twice the memory": ("hbm_gib",),
    "twice the memory's bandwidth": ("bytes_per_s",),
    "twice the arithmetic": ("bf16_flops", "int8_flops"),
    "twice the links between chips": ("link_bytes_per_s",),
}


def gains(given: PlanCase, plan: SizedPlan) -> dict[str, float]:
    return {one.text: one.gain(plan) for one in suggestions(given, plan)}


def twice(given: PlanCase, names: Collection[str]) -> PlanCase:
    chip = given.topology.chip
    chip = replace(chip, **{name: 2 * getattr(chip, name) for name in names})
    return replace(given, topology=replace(given.topology, chip=chip))


def test_fixed_sizes_stay_with_more_hardware() -> None:
    given = case(preset("gemma3_1b", ("plan.slots", "8")))
    plan = choose_placement(given).chosen
    assert plan.config == given.config
    found = gains(given, plan)
    now = given.step(given.config).tokens_per_s
    for change, names in TWICE.items():
        expected = twice(given, names).step(given.config).tokens_per_s / now - 1
        if expected >= 0.01:
            assert found[change] == pytest.approx(expected)
        else:
            assert change not in found
    assert "twice the memory" not in found
    assert "twice the links between chips" not in found


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


def test_links_need_more_than_one_chip() -> None:
    demo = case(load_config(PROJECT / "configs/demo.toml"))
    slow = replace(demo.topology.chip, link_bytes_per_s=1e3)  # as if they took all of the time
    demo = replace(demo, topology=replace(demo.topology, chip=slow))
    single = case(preset("gemma3_270m"), "v5e-1")
    for given in (demo, single):
        changes = gains(given, choose_placement(given).chosen)
        assert changes
        assert not any("links" in change for change in changes)
    sharded = case(preset("gemma3_1b", ("plan.fsdp", "8")))
    assert "twice the links between chips" in gains(sharded, choose_placement(sharded).chosen)


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
    (),
    FREE,
    SPLIT,
    (*FREE, *CAPPED),
    (*FREE, ("plan.slots", "64"), ("plan.slot_buckets", "[32]")),
    (("learner.teacher", "nowhere"), ("learner.distill_coef", "0.1"), ("learner.kl_top_k", "64")),
    (("rollout.top_k", "64"), ("rollout.top_p", "0.9"), ("rollout.min_prompts_per_step", "8")),
]


@pytest.mark.parametrize("overrides", CASES)
def test_a_run_accepts_every_suggestion(overrides: tuple[tuple[str, str], ...]) -> None:
    given = case(preset("gemma3_1b", *overrides))
    found = [one for one in suggestions(given, choose_placement(given).chosen) if one.settings]
    assert found
    tree = given.config.model_dump()
    for one in found:
        texts = {key: show_value(value) for key, value in one.settings.items()}
        assert preset("gemma3_1b", *overrides, *texts.items()) == one.case.config
        named = [
            f"no {key}" if text == "none" else f"{key} = {text}" for key, text in texts.items()
        ]
        assert one.text == ", ".join(named)
        for key, value in one.settings.items():
            table, _, name = key.partition(".")
            assert tree[table][name] != value  # what is set already is not suggested


def test_a_split_placement_may_sample_a_step_ahead() -> None:
    split = (("plan.placement", "split"), ("plan.samplers", "4"), ("plan.learner_devices", "4"))
    ahead = 'rollout.ahead = "one", learner.importance_cap = 2.0'
    for overrides in (split, ()):
        given = case(preset("gemma3_1b", *FREE, *overrides))
        plan = next(one for one in choose_placement(given).compared if one.configured)
        assert (ahead in gains(given, plan)) == bool(overrides)


FOUR = "gemma3_4b"
TOO_LARGE = [
    ("v5e-1", (*FREE, ("plan.hbm_gib", "6"))),
    ("v5e-8", (("plan.slots", "4096"), ("plan.hbm_gib", "5"))),
    ("v5e-8", (("plan.rollout_weights", "merged"), ("learner.importance_cap", "2"))),
    ("v5e-8", (("plan.remat", "none"), ("plan.micro_batch_tokens", "131072"))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "overrides"), TOO_LARGE)
def test_every_change_makes_the_plan_fit(
    topology: str, overrides: tuple[tuple[str, str], ...]
) -> None:
    given = case(preset(FOUR, *overrides), topology)
    plan = choose_placement(given).chosen
    assert not plan.fits
    found = suggestions(given, plan)
    assert any(one.settings for one in found)
    for one in found:
        if needed := one.settings.get("plan.hbm_gib"):
            less = preset(FOUR, *overrides, ("plan.hbm_gib", f"{needed - 0.02:.2f}"))
            assert not plan_again(case(less, topology), plan).fits
        assert one.plan.fits
        assert one.plan.peak_bytes <= one.case.limit_bytes
        texts = {key: show_value(value) for key, value in one.settings.items()}
        taken = (*overrides, *texts.items())
        named = re.match(r"--topology (\S+)", one.text)
        again = case(preset(FOUR, *taken), named[1] if named else topology)
        if chips := re.match(r"chips of ([\d.]+) GiB", one.text):
            chip = replace(again.topology.chip, hbm_gib=float(chips[1]))
            again = replace(again, topology=replace(again.topology, chip=chip))
        choice = choose_placement(again)
        assert (choice.compared[0] if named else choice.chosen).fits, one.text


@pytest.mark.slow
def test_settings_are_combined_only_if_no_single_one_is_enough() -> None:
    few = case(preset(FOUR, *FREE, ("plan.hbm_gib", "9")), "v5e-1")
    changes = [one.text for one in suggestions(few, choose_placement(few).chosen) if one.settings]
    assert changes[:2] == ['model.quantization = "int8"', "lora.rank = 16"]
    tight = (("plan.slots", "4096"), ("plan.hbm_gib", "5"))
    fixed = case(preset(FOUR, *tight))
    (together,) = [
        one for one in suggestions(fixed, choose_placement(fixed).chosen) if one.settings
    ]
    assert together.settings["plan.slots"] is None
    assert together.settings["model.quantization"] == "nf4"
