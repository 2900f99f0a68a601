"""Tables of demo runs: a failed run, the search for the minimum budget, means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from launch.demo import deadline_table
from launch.demo.deadline_table import Row, find_minimum_s, mean_line
from launch.demo.table import DemoRun
from pipeline.evaluate.significance import measure_accuracy
from pipeline.run.run_folder import RunFolder


def of_seed(seed: int, answers: dict[int, bool]) -> Row:
    return Row(90, seed, {}, answers, 80.0)


def test_means_are_over_prompts_that_all_seeds_have_answered():
    whole = {prompt: prompt % 4 != 0 for prompt in range(100)}
    short = dict.fromkeys(range(50), True)
    answers = np.array([[whole[prompt], True] for prompt in range(50)])
    found = measure_accuracy(answers)
    low, high = (100 * bound for bound in found.ci95)
    assert found.accuracy == 0.87
    expected = f"1m30s: mean accuracy 87.0% [{low:.1f}, {high:.1f}]"
    assert mean_line([of_seed(0, whole), of_seed(1, short)]) == expected


@pytest.mark.parametrize("minima", [[91.2], [60.0, 75.5], []])
def test_the_minimum_budget_is_the_first_that_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minima: list[float]
):
    left, asked = list(minima), list[str]()

    def train(name: str, *, folder: Path, settings: Sequence[str]) -> DemoRun:
        asked.append(settings[-1])
        run_folder = RunFolder(folder / name)
        if left:
            (folder / name).mkdir()
            run_folder.journal("refused", minimum_s=left.pop(0))
            return DemoRun(name, 2, 1.0, 0.0, run_folder)
        return DemoRun(name, 0, 1.0, 0.0, run_folder)

    monkeypatch.setattr(deadline_table, "train", train)
    found = find_minimum_s(folder=tmp_path, stamp="x")
    assert found == {(91.2,): 92, (60.0, 75.5): 76, (): 40}[tuple(minima)]
    assert len(asked) == 1 + len(minima)
