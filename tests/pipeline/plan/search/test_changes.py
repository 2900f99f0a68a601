"""Settings laid over what is planned."""

from __future__ import annotations

import pytest

from configs.load import load_config, presets
from pipeline.plan.search.changes import changed, differing, words
from tests.pipeline.plan.presets import PROJECT, case, preset


@pytest.mark.parametrize("name", presets())
def test_no_change_is_the_same_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    given = case(load_config(PROJECT / name))
    assert changed(given, {}) == given


def test_only_what_a_run_would_take_is_planned() -> None:
    given = case(preset("gemma3_1b"))
    other = changed(given, {"plan.kv_cache": "int8", "lora.rank": 8})
    assert other is not None
    assert other.config == preset("gemma3_1b", ("plan.kv_cache", "int8"), ("lora.rank", "8"))
    assert changed(given, {"learner.kl_coef": 0.0}) is None  # learner.kl = "topk" has no use then
    assert changed(given, {"plan.slots": 7}) is None


def test_only_what_is_not_there_has_to_be_set() -> None:
    config = preset("gemma3_1b", ("plan.slot_buckets", "[64]"))
    settings = {"plan.slot_buckets": None, "plan.kv_cache": "model", "plan.remat": "dots"}
    new = differing(config, settings)
    assert new == {"plan.slot_buckets": None, "plan.remat": "dots"}
    assert words(new) == 'no plan.slot_buckets, plan.remat = "dots"'
