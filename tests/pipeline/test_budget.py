"""Budgets and their extensions."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import Config
from pipeline.budget import Budget, extension
from pipeline.run_dir import RunFolder
from tests.fakes import make_config


def folder_of(config: Config, *, ended: str | None = "finished") -> RunFolder:
    folder = RunFolder.of(config)
    folder.create(config)
    folder.close()
    if ended:
        folder.write_summary({"ended": ended, "steps": 3, "deadline_s": None})
    return folder


@pytest.fixture
def timed(tmp_path: Path) -> Config:
    return make_config(tmp_path, budget={"time": "1h", "steps": None})


def test_budgets_of_a_kind_are_added():
    assert Budget(3, None) + Budget(4, None) == Budget(7, None)
    assert Budget(None, 3.5) + Budget(None, 4.0) == Budget(None, 7.5)


def test_the_budget_is_the_configured_one_and_all_extensions(tmp_path: Path, timed: Config):
    config = make_config(tmp_path / "steps", budget={"steps": 10})
    folder = folder_of(config)
    assert Budget.of(config, folder) == Budget(10, None)
    for steps in (5, 7):
        folder.journal("extended", steps=steps, time_s=None)
    assert Budget.of(config, folder) == Budget(22, None)
    folder = folder_of(timed)
    folder.journal("extended", steps=None, time_s=1800)
    assert Budget.of(timed, folder) == Budget(None, 5400)


def test_an_extension_of_another_kind_adds_nothing(timed: Config):
    folder = folder_of(timed)
    folder.journal("extended", steps=5, time_s=None)
    assert Budget.of(timed, folder) == Budget(None, 3600)


def test_an_extension_is_of_the_budgets_kind(tmp_path: Path, timed: Config):
    assert extension("90m", timed, folder_of(timed)) == Budget(None, 5400)
    config = make_config(tmp_path / "steps")
    assert extension("50", config, folder_of(config)) == Budget(50, None)


@pytest.mark.parametrize("text", ["1h", "0", "-3", "2.5", "\N{SUPERSCRIPT TWO}", ""])
def test_a_run_of_steps_is_extended_by_steps(tmp_path: Path, text: str):
    config = make_config(tmp_path)
    with pytest.raises(ValueError, match=r"this run has budget\.steps; give a number of steps"):
        extension(text, config, folder_of(config))


@pytest.mark.parametrize("text", ["50", "0h", "soon"])
def test_a_run_with_a_deadline_is_extended_by_time(timed: Config, text: str):
    with pytest.raises(ValueError, match=r"--extend: this run has budget\.time; .* duration"):
        extension(text, timed, folder_of(timed))


@pytest.mark.parametrize("ended", [None, "interrupted"])
def test_only_a_finished_run_is_extended(tmp_path: Path, ended: str | None):
    config = make_config(tmp_path)
    folder = folder_of(config, ended=ended)
    with pytest.raises(ValueError, match=rf"no finished run in {folder.path}; without --extend"):
        extension("5", config, folder)


def test_a_run_whose_learning_rate_has_decayed_is_not_extended(tmp_path: Path):
    config = make_config(tmp_path, learner={"schedule": "cosine"})
    with pytest.raises(ValueError, match=r"schedule = 'cosine' ends with a learning rate of zero"):
        extension("5", config, folder_of(config))
