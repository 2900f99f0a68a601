from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluate.metric import check_references, with_metric
from tests.samples import make_config, make_data

NUMERIC = {"name": "correct", "function": "rewards.numeric:numeric_answer"}
OWN = {"name": "mine", "function": "mine:score"}


@pytest.mark.parametrize(
    ("part", "references", "metric"),
    [
        (NUMERIC, True, "correct"),
        (NUMERIC, False, "correct"),
        (OWN, True, "exact_answer"),
        (OWN, False, "reward"),
    ],
)
def test_an_unset_metric_depends_on_rewards_and_data(
    part: dict[str, str], references: bool, metric: str
):
    config, split = make_config(Path(), rewards={"functions": [part]}), make_data().test
    if not references:
        prompts = tuple(replace(prompt, answer=None) for prompt in split.prompts)
        split = replace(split, prompts=prompts)
    assert with_metric(config, {"test": split}).eval.metric == metric
    given = config.with_metric("reward")
    assert with_metric(given, {"test": split}) is given


def test_a_resumed_run_keeps_its_metric():
    config, splits = make_config(Path(), rewards={"functions": [NUMERIC]}), {"test": None}
    saved: dict[str, Any] = {"eval": {"metric": "exact_answer"}}
    assert with_metric(config, splits, saved=saved).metric == "exact_answer"
    saved["eval"]["metric"] = "gone"
    with pytest.raises(ValueError, match="selects its best version by the reward 'gone'"):
        with_metric(config, splits, saved=saved)


def test_a_place_of_answers_that_the_metric_does_not_use_is_refused():
    tables: dict[str, Any] = {
        "rewards": {"functions": [NUMERIC]},
        "eval": {"extraction": "last_number"},
    }
    config, split = make_config(Path(), **tables), make_data().test
    assert with_metric(config, {"test": split}).metric == "exact_answer"
    prompts = tuple(replace(prompt, answer=None) for prompt in split.prompts)
    with pytest.raises(ValueError, match=r'= "reward", a reward, .*; set prompt\.answer'):
        with_metric(config, {"test": replace(split, prompts=prompts)})


def test_exact_answers_need_reference_answers():
    config, test = make_config(Path()), make_data().test
    prompts = [replace(prompt, answer=None) for prompt in test.prompts]
    none = replace(test, prompts=tuple(prompts))
    some = replace(test, prompts=(*test.prompts[:3], prompts[3]))
    splits = {"data.validation": test, "data.test": none, "eval.sets (x)": some}
    with pytest.raises(ValueError, match="no reference answer") as caught:
        check_references(config, splits)
    first, second = str(caught.value).splitlines()
    assert first.startswith("data.test: its rows have no reference answer in column 'answer'; ")
    assert second.startswith("eval.sets (x): 1 of its 4 rows have no reference answer in column")
    assert second.endswith('to "reward" or a reward part: correct, format')
    check_references(config, {"data.test": test, "data.validation": None})
    check_references(make_config(Path(), eval={"metric": "format"}), splits)
