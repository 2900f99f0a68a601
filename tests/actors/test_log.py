"""The log of an actor's process: a line for each piece of work, with its duration."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from actors import log
from actors.log import LOG, begin_process, logged_work, logs

STAMP = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(LOG, "handlers", list[Any]())
    readings = count(100.0, 1.5)  # of the clock at the start and the end of the work
    clock = SimpleNamespace(monotonic=lambda: next(readings), gmtime=time.gmtime)
    monkeypatch.setattr(log, "time", clock)
    begin_process()
    begin_process()  # once is enough
    yield
    LOG.propagate = True


class Sampler:
    version = 3

    @logs(lambda actor, rows: f"generated {len(rows)} rollouts of version {actor.version}")
    def generate(self, count: int, *, fails: bool = False) -> list[int]:
        """Generates."""
        if fails:
            raise ValueError("no slots")
        return list(range(count))


def test_a_method_writes_what_it_did_and_how_long_it_took(capsys: pytest.CaptureFixture[str]):
    assert Sampler().generate(2) == [0, 1]
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(STAMP + r"generated 2 rollouts of version 3 in 1\.50 s$", line)
    assert Sampler.generate.__doc__ == "Generates."


def test_a_failure_is_a_line_and_is_raised(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match="no slots"):
        Sampler().generate(2, fails=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(STAMP + r"generate failed after 1\.50 s: ValueError: no slots$", line)


def test_work_that_says_nothing_has_its_name(capsys: pytest.CaptureFixture[str]):
    with logged_work("score"):
        pass
    assert capsys.readouterr().out.endswith(" score in 1.50 s\n")
