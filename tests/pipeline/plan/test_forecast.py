"""The forecast: every second is counted once, and what is written to disk."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from configs.load import load_config
from pipeline.data.models.find_shape import unused_bytes
from pipeline.deadline import SAFETY
from pipeline.plan.cost_model.programs import compile_s
from pipeline.plan.forecast import Forecast, compiled_programs, forecast
from pipeline.plan.search.fitting import PlanCase, SizedPlan, choose_placement
from tests.pipeline.plan.presets import FREE, PROJECT, case, choice, preset

GIB = 2**30


@cache
def planned(*overrides: tuple[str, str]) -> Forecast:
    return forecast(*case_and_plan(*overrides))


def case_and_plan(
    *overrides: tuple[str, str], model: str = "gemma3_1b"
) -> tuple[PlanCase, SizedPlan]:
    return case(preset(model, *overrides)), choice(model, *overrides).chosen


def spent(activity: str, *overrides: tuple[str, str]) -> float:
    return planned(*overrides).spent_s[activity]


@pytest.mark.parametrize("hours", [1, 24])
def test_a_time_budget_is_used_and_kept(hours: int) -> None:
    given, plan = case_and_plan(("budget.time", f"{hours}h"))
    found = forecast(given, plan)
    assert found.steps > 0
    assert found.wall_s == pytest.approx(sum(found.spent_s.values()))
    # The rest is the safety margin and less than a step.
    end_s = found.spent_s["tests"] / 2 + found.spent_s["validation"] + found.spent_s["export"]
    margin_s = (SAFETY - 1) * end_s + (SAFETY + 2) * plan.step.total.expected
    assert 3600 * hours - margin_s <= found.wall_s <= 3600 * hours


def test_a_step_budget_takes_the_time_of_its_steps() -> None:
    found = planned(("budget.steps", "100"), ("budget.time", "none"))
    assert (found.steps, found.grpo_steps, found.samples) == (100, 100, 51_200)
    assert found.tokens == pytest.approx(51_200 * 0.35 * 704)


def test_the_sft_phase_and_evaluations_count_in_the_budget() -> None:
    sft = [("run.phases", '["sft", "grpo"]'), ("sft.train.path", "a.jsonl"), ("sft.steps", "50")]
    assert spent("SFT phase", *sft) > 0 == spent("SFT phase")
    assert planned(*sft).grpo_steps == planned(*sft).steps - 50
    assert planned(*sft).grpo_steps < planned().grpo_steps
    often, seldom = (("eval.every_minutes", "1"),), (("eval.every_minutes", "60"),)
    assert planned(*often).grpo_steps < planned(*seldom).grpo_steps
    assert spent("validation", *often) > 20 * spent("validation", *seldom)


def test_the_first_step_comes_after_all_that_precedes_it() -> None:
    found, step_s = planned(*FREE), choice("gemma3_1b", *FREE).chosen.step.total.expected
    before = [found.spent_s[name] for name in ("download", "start", "compile", "sizing")]
    # Tests and exports are done once more at the end, validations also in between.
    once = (found.spent_s["tests"] + found.spent_s["export"]) / 2
    least = sum(before) + once + step_s
    assert least < found.first_step_s < least + found.spent_s["validation"] / 2


def test_weights_are_downloaded_and_exported(tmp_path: Path) -> None:
    given, plan = case_and_plan(model="gemma4_e2b")
    found = forecast(given, plan)
    # With the towers of the multimodal model.
    weights = 2 * given.shape.parameters + unused_bytes(given.config)
    assert found.download_gib == weights / GIB
    assert found.spent_s["download"] == pytest.approx(weights / 1e8)
    adapter = 4 * given.shape.adapter_parameters(given.config.lora)
    assert found.disk_gib["export"] == pytest.approx((weights + adapter) / GIB)
    assert found.spent_s["export"] > 2 * weights / 0.25e9
    model = given.config.model.model_copy(update={"path": str(tmp_path)})
    local = replace(given, config=given.config.model_copy(update={"model": model}))
    found = forecast(local, plan)
    assert (found.download_gib, found.spent_s["download"]) == (0, 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [("test.jsonl", '{"a": 1}\n\n{"a": 2}\n'), ("test.csv", 'a,b\n"1\n",2\n3,4\n')],
)
def test_rows_are_known_from_files_or_settings(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    local = [("data.test.path", str(path)), ("data.test.subset", "none")]
    found = planned(*local, ("data.test.split", "none"))
    assert (found.evaluated, found.guessed) == ({"test": 2, "boolq": 500, "validation": 256}, ())
    assert planned().guessed == ("test",)
    sliced = planned(("data.test.split", "test[100:150]"), ("data.test.limit", "40"))
    assert (sliced.evaluated["test"], sliced.guessed) == (40, ())


def test_disk_space_counts_the_written_files() -> None:
    given, plan = case_and_plan(("checkpoint.keep", "3"))
    found = forecast(given, plan)
    adapter = 4 * given.shape.adapter_parameters(given.config.lora)
    assert found.disk_gib["checkpoints"] == (3 * 3 * adapter + adapter) / GIB
    assert found.disk_gib["export"] == (2 * given.shape.parameters + adapter) / GIB
    with_tokens = planned(("records.tokens", "true"))
    assert with_tokens.disk_gib["rollouts"] > 3 * found.disk_gib["rollouts"]


def test_programs_and_their_compile_times_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    given, plan = case_and_plan()
    names = compiled_programs(given, plan)
    # empty, 2 prefills, 2 fills, 4 segments, 3 x 3 of compactions, score, keep, gradient, apply
    assert len(names) == 22
    assert spent("compile") == compile_s(names, given.shape, platform="tpu")
    monkeypatch.chdir(PROJECT)
    demo = case(load_config(PROJECT / "configs/demo.toml"))
    names = compiled_programs(demo, choose_placement(demo).chosen)
    # The seconds by kind were measured one after the other, on two cores (2026-11-22).
    assert compile_s(names, demo.shape, platform="cpu") == pytest.approx(26, rel=0.1)
