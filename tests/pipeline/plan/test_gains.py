"""What would have to change to gain most: the plan made again with one thing relaxed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.plan.gains import gains
from pipeline.plan.search import choose, in_its_place
from tests.pipeline.plan.presets import FREE, case, preset


def test_gains_are_those_of_a_plan_made_again() -> None:
    given = case(preset("gemma3_1b", *FREE))
    plan = choose(given).chosen
    found = {gain.change: gain.share for gain in gains(given, plan)}
    chip = replace(given.topology.chip, bytes_per_s=2 * given.topology.chip.bytes_per_s)
    fast = replace(given, topology=replace(given.topology, chip=chip))
    again = in_its_place(fast, plan)
    assert again is not None
    expected = again.step.tokens_per_s / plan.step.tokens_per_s - 1
    assert found["twice the memory's bandwidth"] == pytest.approx(expected)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert min(found.values()) >= 0.01


def test_memory_binds_where_slots_are_short_of_it() -> None:
    given = case(preset("gemma3_4b", *FREE, ("rollout.prompts_per_step", "64")))
    tight = replace(given.topology.chip, hbm_gib=11.0)
    given = replace(given, topology=replace(given.topology, chip=tight))
    plan = next(one for one in choose(given).compared if one.configured)
    found = {gain.change for gain in gains(given, plan)}
    assert "twice the memory" in found


def test_settings_that_are_there_already_bring_nothing() -> None:
    settings = [("plan.kv_cache", "int8"), ("learner.kl_coef", "0"), ("learner.kl", "k3")]
    given = case(preset("gemma3_1b", *settings, ("learner.kl_top_k", "128")))
    changes = [gain.change for gain in gains(given, choose(given).chosen) if gain.is_setting]
    assert not any("kv_cache" in change or "kl_coef" in change for change in changes)
    assert "rollout.prompts_per_step = 64" in changes
