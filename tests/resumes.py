"""Runs that end at any call of a worker, and resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import Disk, Killed, Process, Script, kill, left_behind


def check_same_run(
    process: Callable[[Path, Disk, Script], Process], folder: Path, *, hard: bool
) -> Process:
    """Checks that a run which ends at any of its calls and resumes is the undisturbed run.

    Args:
        process: makes a process of the run in a folder.
        folder: for one run for each call.
        hard: whether the run is killed at the call; else a signal stops it.

    Returns:
        The undisturbed run.
    """
    whole = process(folder / "whole", Disk(), Script())
    assert whole.run() == "finished"
    expected, calls = left_behind(whole.folder), whole.script.calls
    for number, call in enumerate(calls if hard else calls[:-1]):
        own, disk, script = folder / f"{number}", Disk(), Script()
        script.on[number] = kill if hard else script.stop.set
        first = process(own, disk, script)
        if hard:
            with pytest.raises(Killed):
                first.run()
        else:
            assert first.run() == "interrupted", call
        second = process(own, disk, Script())
        assert second.run() == "finished", call
        assert left_behind(second.folder) == expected, call
        assert second.learner.adapter == whole.learner.adapter, call
    return whole
