"""`make deadline-table`: search for the minimum budget, and means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from launch.demo import deadline_table
from launch.demo.deadline_table import Row, find_minimum_s, mean_line
from pipeline.evaluate.significance import measure_accuracy
from pipeline.run.run_folder import RunFolder


def row(seed: int, answers: dict[int, bool]) -> Row:
    return Row(90, seed, {}, answers, 80.0)


def test_means_are_over_prompts_that_all_seeds_have_answered():
    whole = {prompt: prompt % 4 != 0 for prompt in range(100)}
    short = dict.fromkeys(range(50), True)
    answers = np.array([[whole[prompt], True] for prompt in range(50)])
    found = measure_accuracy(answers)
    low, high = (100 * bound for bound in found.ci95)
    assert found.accuracy == 0.87
    expected = f"1m30s: mean accuracy 87.0% [{low:.1f}, {high:.1f}]"
    assert mean_line([row(0, whole), row(1, short)]) == expected


@pytest.mark.parametrize("minima", [[91.2], [60.0, 75.5], []])
def test_the_minimum_budget_is_the_first_that_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minima: list[float]
):
    left, asked = list(minima), list[str]()

    def train(name: str, *, folder: Path, settings: Sequence[str]) -> int:
        asked.append(settings[1])
        if not left:
            return 0
        (folder / name).mkdir()
        RunFolder(folder / name).journal("refused", minimum_s=left.pop(0))
        return 2

    monkeypatch.setattr(deadline_table, "train", train)
    found = find_minimum_s(folder=tmp_path, stamp="x")
    assert found == {(91.2,): 92, (60.0, 75.5): 76, (): 40}[tuple(minima)]
    assert len(asked) == 1 + len(minima)


def test_another_failure_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deadline_table, "train", lambda *_, **__: 1)
    with pytest.raises(RuntimeError, match="exit status 1"):
        find_minimum_s(folder=tmp_path, stamp="x")
