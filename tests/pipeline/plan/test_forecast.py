"""What becomes of the budget: every second counted once, and what is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.plan.forecast import Forecast, forecast
from pipeline.plan.search import choose
from pipeline.reserve import SAFETY
from tests.pipeline.plan.presets import case, preset

GIB = 2**30


def planned(*overrides: tuple[str, str], model: str = "gemma3_1b") -> Forecast:
    given = case(preset(model, *overrides))
    return forecast(given, choose(given).chosen)


@pytest.mark.parametrize("hours", [1, 9, 24])
def test_a_time_budget_is_used_and_kept(hours: int) -> None:
    given = case(preset("gemma3_1b", ("budget.time", f"{hours}h")))
    plan = choose(given).chosen
    found = forecast(given, plan)
    for pace, outcome in found.outcomes.items():
        assert outcome.wall_s == pytest.approx(sum(outcome.spent_s.values()))
        assert outcome.wall_s <= 3600 * hours
        step_s = getattr(plan.step.total, pace)
        # What is left is the margin, and less than a step.
        end_s = outcome.spent_s["tests"] / 2 + outcome.spent_s["validation"]
        margin_s = (SAFETY - 1) * (end_s + outcome.spent_s["export"]) + (SAFETY + 2) * step_s
        assert outcome.wall_s >= 3600 * hours - margin_s
    steps = [found.outcomes[pace].steps for pace in ("high", "expected", "low")]
    assert steps == sorted(steps)
    assert steps[0] > 0


def test_a_step_budget_is_as_long_as_it_takes() -> None:
    found = planned(("budget.steps", "100"), ("budget.time", "none"))
    assert {outcome.steps for outcome in found.outcomes.values()} == {100}
    low, expected, high = (found.outcomes[p].wall_s for p in ("low", "expected", "high"))
    assert low < expected < high
    assert found.grpo_steps == 100
    assert found.samples == 51_200
    assert found.tokens == pytest.approx(51_200 * 0.35 * 704)


def test_the_cost_is_chips_times_hours() -> None:
    found = planned(("plan.chip_hour_usd", "2"))
    hours = found.outcomes["expected"].wall_s / 3600
    assert found.cost_usd == pytest.approx(hours * 8 * 2)


def test_a_warm_start_is_paid_from_the_budget() -> None:
    sft = [("run.phases", '["sft", "grpo"]'), ("sft.train.path", "a.jsonl"), ("sft.steps", "50")]
    cold, warm = planned(), planned(*sft)
    spent = warm.outcomes["expected"].spent_s["warm start"]
    assert spent > 0
    assert cold.outcomes["expected"].spent_s["warm start"] == 0
    assert warm.grpo_steps == warm.outcomes["expected"].steps - 50
    assert warm.grpo_steps < cold.grpo_steps
    assert warm.programs == cold.programs + 1  # imitation; a small micro-batch is a full one here


def test_evaluations_are_paid_from_the_budget() -> None:
    often, seldom = planned(("eval.every_minutes", "1")), planned(("eval.every_minutes", "60"))
    assert often.grpo_steps < seldom.grpo_steps
    spent = [one.outcomes["expected"].spent_s["validation"] for one in (often, seldom)]
    assert spent[0] > 20 * spent[1]


def test_rows_are_counted_where_something_tells_them(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
    local = [("data.test.path", str(path)), ("data.test.subset", "none")]
    found = planned(*local, ("data.test.split", "none"))
    assert found.rows == {"test": 2, "boolq": 500, "validation": 256}
    assert found.guessed == ()
    assert planned().guessed == ("test",)
    sliced = planned(("data.test.split", "test[100:150]"), ("data.test.limit", "40"))
    assert sliced.rows["test"] == 40
    assert sliced.guessed == ()


def test_disk_is_counted_by_what_is_written() -> None:
    given = case(preset("gemma3_1b", ("checkpoint.keep", "3")))
    found = forecast(given, choose(given).chosen)
    adapter = 4 * given.shape.adapter_parameters(given.config.lora)
    assert found.disk_bytes["checkpoints"] == 3 * 3 * adapter + adapter
    assert found.disk_bytes["export"] == 2 * given.shape.parameters + adapter
    with_tokens = planned(("records.tokens", "true"))
    assert with_tokens.disk_bytes["rollouts"] > 3 * found.disk_bytes["rollouts"]


def test_programs_are_counted_and_what_was_compiled_is_known() -> None:
    given = case(preset("gemma3_1b"))
    plan = choose(given).chosen
    found = forecast(given, plan)
    # empty, 2 prefills, 2 fills, 4 segments, 3 compactions, score, keep, gradient, apply
    assert found.programs == 16
    known = forecast(given, plan, compile_s={"gradient 8": 1.0})
    assert found.compile_s - known.compile_s == pytest.approx(26 * 2.0 - 1.0)
