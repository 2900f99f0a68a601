"""Durations and deadlines of budgets."""

from __future__ import annotations

import time

import pytest

from configs.base import parse_duration_s
from configs.budget import Budget, parse_instant


@pytest.mark.parametrize(
    ("text", "seconds"), [("9h", 32_400), ("1h30m", 5_400), ("90s", 90), ("1d1s", 86_401)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "9", "h", "0h", "1m1h", "-1h", "1.5h", "1h 30m", "٣h"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write for example '9h'"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    "text", ["2026-11-22T18:00:00+01:00", "2026-11-22T17:00Z", "2026-11-22 12:00-05:00"]
)
def test_an_instant_is_the_same_in_every_time_zone(text: str) -> None:
    assert Budget(until=text).until_s == 1_795_366_800


def test_an_instant_without_an_offset_is_in_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XYZ+02:00")  # POSIX: two hours behind
    time.tzset()
    try:
        assert parse_instant("2026-11-22T15:00").timestamp() == 1_795_366_800
    finally:
        monkeypatch.undo()
        time.tzset()
