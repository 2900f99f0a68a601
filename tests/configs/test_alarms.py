"""The table `alarms`: thresholds by rule, and settings without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.alarms import Alarms
from tests.samples import make_config


def problems(folder: Path, **tables: Any) -> str:
    with pytest.raises(ValueError, match="alarms") as refused:
        make_config(folder, **tables)
    return str(refused.value)


def test_a_rule_has_one_threshold_and_bounds():
    rules = [Alarms().rule(name) for name in Alarms.model_fields]
    below = {type(rule).__name__ for rule in rules if rule.bound == "below"}
    falls = {"WellFormedFalls", "CorrectFalls", "EntropyFalls"}
    assert below == {"VarianceGone", "EntropyCollapse", "ThroughputDown", *falls}
    excluded, gone = Alarms().excluded, Alarms().variance_gone
    assert (excluded.threshold, excluded.steps, excluded.action) == (0.5, 1, "stop")
    assert [excluded.exceeds(value) for value in (0.4, 0.5, 0.6)] == [False, False, True]
    assert [gone.exceeds(value) for value in (0.05, 0.1, 0.2)] == [True, False, False]


def test_promise_8_a_rule_that_is_off_has_no_other_settings(tmp_path: Path):
    rule = {"action": "off", "above": 0.3, "steps": 4}
    shown = problems(tmp_path, alarms={"excluded": rule})
    for key in ("above", "steps"):
        assert f'{key}: has no effect with action = "off"; remove it' in shown
    make_config(tmp_path, alarms={"excluded": {"action": "off"}})


def test_promise_8_rules_that_the_run_cannot_evaluate_are_refused(tmp_path: Path):
    one = {"functions": [{"name": "a", "function": "a.py:f"}]}
    alarms = {
        "dominating": {"action": "stop"},
        "validation_falls": {"above": 2.0},
        "rising_while_validation_falls": {"steps": 3},
    }
    shown = problems(tmp_path, alarms=alarms, rewards=one)
    assert "alarms.dominating.action: has no effect with less than two weighted rewards" in shown
    assert "alarms.validation_falls.above: has no effect without eval" in shown
    assert "alarms.rising_while_validation_falls.steps: has no effect without eval" in shown
    shown = problems(tmp_path, alarms={"kl": {"above": 0.6}})
    assert "alarms.kl.above: has no effect with learner.kl_coef = 0" in shown
    make_config(tmp_path, alarms={"kl": {"above": 0.6}}, learner={"kl_coef": 0.01})
    validates: dict[str, Any] = {
        "data": {"validation": {"path": "v.jsonl"}},
        "eval": {"every_steps": 2},
    }
    make_config(tmp_path, alarms=alarms, **validates)
    # The penalty for long completions is a second part.
    overlong: dict[str, Any] = {"rollout": {"overlong_tokens": 10}}
    make_config(tmp_path, alarms=alarms, rewards=one, **validates, **overlong)
