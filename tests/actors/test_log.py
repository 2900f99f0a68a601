"""The log of an actor's process: a line for each piece of work, with its duration."""

from __future__ import annotations

import re
from itertools import count
from types import SimpleNamespace

import pytest

from actors import log
from actors.log import logged_work, logs

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "


class Sampler:
    version = 3

    @logs(lambda actor, rows: f"generated {len(rows)} rollouts of version {actor.version}")
    def generate(self, count: int, *, fails: bool = False) -> list[int]:
        """Generates."""
        if fails:
            raise ValueError("no slots")
        return list(range(count))


def test_work_is_a_line_with_what_it_did_and_how_long_it_took(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    readings = count(100.0, 1.5)  # of the clock at the start and the end of the work
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: next(readings)))
    assert Sampler().generate(2) == [0, 1]
    with pytest.raises(ValueError, match="no slots"):
        Sampler().generate(2, fails=True)
    with logged_work("score"):
        pass  # says nothing, and has its name
    lines = (
        r"generated 2 rollouts of version 3 in 1\.50 s",
        r"generate failed after 1\.50 s: ValueError: no slots",
        r"score in 1\.50 s",
    )
    shown = capsys.readouterr().out
    assert re.fullmatch("".join(f"{STAMP}{line}\n" for line in lines), shown)
    assert Sampler.generate.__doc__ == "Generates."
