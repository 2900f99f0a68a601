"""Checks before devices are reserved, and that a resumed run has the same data."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from configs.schema import Config
from launch import preparation
from launch.flags import SUBMITTED
from launch.preparation import Prepared, check_devices, finished, prepare
from pipeline.run.run_folder import RunFolder


@pytest.fixture
def config(request_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(preparation, "check", lambda _: [])
    return load_config(request_path)


def begin(config: Config) -> Prepared:
    """Makes a run folder that was started with the current data."""
    prepared = prepare(config, extend=None)
    prepared.folder.create(config)
    data = prepared.data.fingerprints
    facts = {"code": None, "base": prepared.base, "data": data, "rewards": {}}
    prepared.folder.journal("started", wandb_id=None, elapsed_s=60.0, **facts)
    prepared.folder.close()
    return prepared


def test_a_run_does_not_resume_with_another_base(tmp_path: Path, config: Config):
    began = begin(config)
    assert began.base is not None
    assert prepare(config, extend=None).base == began.base
    weights = next((tmp_path / "model").glob("*.safetensors"))
    text = bytearray(weights.read_bytes())
    text[-1] ^= 1
    weights.write_bytes(text)
    with pytest.raises(ValueError, match=r"model\.path: the weights in .*/model have changed"):
        prepare(config, extend=None)


def test_promise_3_a_run_does_not_resume_with_changed_data(tmp_path: Path, config: Config):
    begin(config)
    for name, told in (("train", "data.train"), ("test", "data.train and data.test")):
        path = tmp_path / f"{name}.jsonl"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace('"answer": "', '"answer": "1', 1), encoding="utf-8")
        with pytest.raises(ValueError, match=f"^{told}: the prompts have changed since"):
            prepare(config, extend=None)


def timed(config: Config, **budget: object) -> Config:
    given = {"steps": None, "time": None, "until": None, **budget}
    return config.model_copy(update={"budget": config.budget.model_copy(update=given)})


def test_promise_6_a_budget_below_the_estimated_minimum_is_refused_at_once(config: Config):
    told = r"^budget\.time = 10s is too short: .* take at least \d+s \(estimated\)$"
    with pytest.raises(ValueError, match=told):
        prepare(timed(config, time="10s"), extend=None)
    prepare(timed(config, time="65s"), extend=None)
    begin(config)  # a resumed run needs no minimum
    prepare(timed(config, time="10s"), extend=None)


def test_a_run_whose_time_has_passed_ends_with_its_latest_version(
    config: Config, capsys: pytest.CaptureFixture[str]
):
    over = timed(config, until="2020-01-01T10:00Z")
    folder = begin(config).folder
    with pytest.raises(ValueError, match=r"has passed: it is .* now; set a later one$"):
        prepare(over, extend=None)
    folder.journal("checkpoint", step=1, elapsed_s=2.0, seconds=0.1)
    prepare(over, extend=None)
    assert "; the run ends with its latest version" in capsys.readouterr().out


def test_promise_6_a_finished_run_is_not_reopened_with_too_little_time(config: Config):
    folder = begin(timed(config, time="5m")).folder
    folder.write_metrics({"step": 1, "time/step_s": 30.0, "time/elapsed_s": 250.0})
    folder.journal("checkpoint", step=1, seconds=2.0, elapsed_s=290.0)
    folder.write_summary({"ended": "finished", "steps": 1, "deadline_s": 300})
    with pytest.raises(
        ValueError, match=r"^budget\.time = 5m10s is too short: 20s .* take at least \d+s"
    ):
        prepare(timed(config, time="5m"), extend="10s")
    prepare(timed(config, time="5m"), extend="1m22s")


TEN = "2999-01-01T10:00Z"


@pytest.mark.parametrize(
    ("summary", "budget", "is_finished"),
    [
        ({}, {"steps": 2}, True),
        ({}, {"steps": 4}, False),
        ({"ended": "interrupted", "steps": 2}, {"steps": 3}, False),
        ({"deadline_s": 3600}, {"time": "1h"}, True),
        ({"deadline_s": 3600}, {"time": "2h"}, False),
        ({"until_s": datetime.fromisoformat(TEN).timestamp() - 3600}, {"until": TEN}, False),
    ],
)
def test_a_run_is_finished_when_its_budget_is_used(
    config: Config, summary: dict[str, Any], budget: dict[str, Any], is_finished: bool
):
    folder = RunFolder.of(config)
    folder.create(config)
    folder.write_summary({"ended": "finished", "steps": 3, "deadline_s": None, **summary})
    folder.close()
    assert (finished(timed(config, **budget), extend=None) is not None) is is_finished


def test_more_time_is_refused_after_the_learning_rate_has_decayed(config: Config):
    learner = config.learner.model_copy(update={"schedule": "linear"})
    decaying = timed(config, time="1h").model_copy(update={"learner": learner})
    folder = begin(decaying).folder
    folder.write_summary({"ended": "finished", "steps": 3, "deadline_s": 3600})
    assert finished(decaying, extend=None) is not None
    with pytest.raises(ValueError, match=r"^budget\.time = 2h: .* has decayed to zero"):
        finished(timed(decaying, time="2h"), extend=None)


def test_given_chips_replace_the_count_of_this_machine(
    request_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RAY_ADDRESS", SUBMITTED, "TPU_VISIBLE_CHIPS"):
        monkeypatch.delenv(name, raising=False)
    settings = {"plan.platform": "tpu", "plan.placement": "colocated", "plan.slots": "8"}
    settings |= {"plan.learner_devices": "8", "plan.micro_batch_tokens": "544"}

    def config(chips: int) -> Config:
        return load_config(request_path, [*settings.items(), ("run.tpu_chips", str(chips))])

    check_devices(config(8))
    with pytest.raises(ValueError, match=r"needs 8 TPU, and run\.tpu_chips gives 4; "):
        check_devices(config(4))
    monkeypatch.setenv("RAY_ADDRESS", "1")
    told = r"^run\.tpu_chips = 8: a cluster counts .* `ray start --resources='\{\"TPU\": 8\}'`$"
    with pytest.raises(ValueError, match=told):
        check_devices(config(8))
