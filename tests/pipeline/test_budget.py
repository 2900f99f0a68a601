"""Budgets and their extensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.base import parse_duration_s
from configs.budget import parse_instant
from configs.schema import Config
from pipeline.budget import (
    Budget,
    extension,
    replaces_budget,
    used_s,
)
from pipeline.deadline import show_duration
from pipeline.run.run_folder import RunFolder
from tests.samples import make_config


def folder_of(config: Config, *, ended: str | None = "finished") -> RunFolder:
    folder = RunFolder.of(config)
    folder.create(config)
    folder.close()
    if ended:
        folder.write_summary({"ended": ended, "steps": 3, "deadline_s": None})
    return folder


TIMED: dict[str, Any] = {"budget": {"time": "1h", "steps": None}}
UNTIL: dict[str, Any] = {"budget": {"until": "2026-11-22T17:00Z", "steps": None}}


@pytest.mark.parametrize(
    ("old", "more", "new", "expected"),
    [
        ({"time": "1h"}, {"steps": None, "time_s": 3600}, {"time": "3h"}, Budget(None, 10_800)),
        ({"steps": 60}, {"steps": 20, "time_s": None}, {"time": "1h"}, Budget(None, 3600)),
        (
            {"until": "2026-11-22T17:00Z"},
            {"steps": None, "time_s": 7200},
            {"until": "2026-11-23T09:00Z"},
            Budget(None, None, 1_795_366_800 + 16 * 3600),
        ),
    ],
)
def test_another_budget_replaces_the_old_one_and_its_extensions(
    tmp_path: Path,
    old: dict[str, Any],
    more: dict[str, Any],
    new: dict[str, Any],
    expected: Budget,
):
    before = make_config(tmp_path, budget={"steps": None, **old})
    after = make_config(tmp_path, budget={"steps": None, **new})
    folder = folder_of(before)
    folder.journal("extended", **more)
    assert Budget.of(before, folder) == Budget.given(before.budget) + Budget(**more)
    assert not replaces_budget(before, folder)
    assert Budget.of(after, folder) == expected
    assert replaces_budget(after, folder)
    # The resumed run journals the budget and saves the configuration.
    folder.journal("budget", step=2, **vars(expected))
    folder.create(after)
    folder.close()
    assert Budget.of(after, folder) == expected
    assert Budget.of(before, folder) == Budget.given(before.budget)
    folder.journal("extended", **{**more, "steps": 7, "time_s": 8})
    assert Budget.of(after, folder) == expected + Budget(7, 8)


def test_the_same_budget_in_another_notation_is_no_replacement(tmp_path: Path):
    timed = make_config(tmp_path, **TIMED)
    folder = folder_of(timed)
    assert not replaces_budget(make_config(tmp_path, budget={"time": "60m", "steps": None}), folder)
    assert not replaces_budget(timed, RunFolder(tmp_path / "none"))


def test_deadline_of_each_kind_of_budget_on_the_runs_clock():
    assert Budget(None, 900.0).deadline_s(elapsed_s=50.0, now_s=1e9) == 900.0
    assert Budget(5, None).deadline_s(elapsed_s=50.0, now_s=1e9) is None
    # 50 s are used, and 300 s remain until the instant.
    assert Budget(None, None, 1e9 + 300).deadline_s(elapsed_s=50.0, now_s=1e9) == 350.0


def test_a_budget_is_shown_as_a_setting():
    assert Budget(7, None).name == "budget.steps = 7"
    assert Budget(None, 5400.0).name == "budget.time = 1h30m"
    assert Budget(None, None, 1_795_366_800).name.startswith("budget.until = 2026-11-2")
    assert parse_instant(Budget(None, None, 1_795_366_800).name[15:]).timestamp() == 1_795_366_800


@given(st.integers(1, 10**6))
def test_shown_durations_are_parsed_back(seconds: int):
    assert parse_duration_s(show_duration(seconds)) == seconds
    assert show_duration(seconds - 0.5) == show_duration(seconds)


def test_used_time_is_the_latest_record(tmp_path: Path):
    config = make_config(tmp_path)
    killed, folder = RunFolder.of(config), RunFolder.of(config)
    with killed.held():
        assert used_s(killed) == 0.0
        killed.record_used_s(12.25)
        killed.close()  # as after a kill before the start: the folder still has a lock file
        folder.check(config)
        with folder.held():
            assert used_s(folder) == 12.25
            folder.create(config)
    folder.journal("checkpoint", step=2, elapsed_s=80.0, seconds=1.0)
    assert used_s(folder) == 80.0
    # A step after the last checkpoint is trained again, but its time counts.
    folder.write_metrics({"step": 3, "time/elapsed_s": 95.0})
    assert used_s(folder) == 95.0


@pytest.mark.parametrize(
    ("budget", "text", "added"),
    [
        ({"steps": 3}, "50", Budget(50, None)),
        ({"time": "1h"}, "90m", Budget(None, 5400)),
        ({"until": "2026-11-22T17:00Z"}, "1h", Budget(None, 3600)),
    ],
)
def test_an_extension_is_of_the_budgets_kind(
    tmp_path: Path, budget: dict[str, Any], text: str, added: Budget
):
    config = make_config(tmp_path, budget={"steps": None, **budget})
    assert extension(text, config, folder_of(config)) == added


@pytest.mark.parametrize(
    ("tables", "texts", "told"),
    [
        ({}, ("1h", "0", "-5", "2.5", ""), r"has budget\.steps; give a number of"),
        (UNTIL, ("50",), r"this run has budget\.until; .* duration"),
        (TIMED, ("50", "0h", "-5m", "soon"), r"--extend: this run has budget\.time; .* duration"),
        ({"learner": {"schedule": "cosine"}}, ("5",), "'cosine' ends with a learning rate of zero"),
    ],
)
def test_other_extensions_are_refused(
    tmp_path: Path, tables: dict[str, Any], texts: tuple[str, ...], told: str
):
    config = make_config(tmp_path, **tables)
    folder = folder_of(config)
    for text in texts:
        with pytest.raises(ValueError, match=told):
            extension(text, config, folder)


@pytest.mark.parametrize("ended", [None, "interrupted"])
def test_only_a_finished_run_is_extended(tmp_path: Path, ended: str | None):
    config = make_config(tmp_path)
    folder = folder_of(config, ended=ended)
    with pytest.raises(ValueError, match=rf"no finished run in {folder.path}; without --extend"):
        extension("5", config, folder)
