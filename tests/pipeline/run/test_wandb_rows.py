"""The rows of a W&B run: ascending, complete, nothing twice."""

from __future__ import annotations

from typing import Any

from pipeline.run.wandb_rows import WandbRows


def evaluated(name: str, version: int) -> dict[str, Any]:
    return {f"eval/{name}/version": version}


def test_evaluations_are_in_the_row_of_their_step():
    rows = WandbRows([])
    assert rows.of_evaluation(("test_before", 0, 0), step=0) == 0
    assert rows.of_evaluation(("validation", 0, 0), step=0) == 0
    assert rows.of_step(1) == 1
    assert rows.of_evaluation(("validation", 1, 0), step=1) == 1
    # The end of the run evaluates an earlier version.
    assert rows.of_evaluation(("test_after", 0, 0), step=1) == 1
    assert rows.of_step(2) == 2


def test_what_wandb_has_keeps_its_first_values():
    history = [{"_step": 1, "step": 1, **evaluated("validation", 1)}, {"_step": 2, "step": 2}]
    rows = WandbRows(history)
    assert rows.step == 2
    assert [rows.of_step(step) for step in (1, 2, 3)] == [None, None, 3]
    assert rows.of_evaluation(("validation", 1, 0), step=3) is None
    assert rows.of_evaluation(("validation", 3, 0), step=3) == 3


def test_an_evaluation_after_a_stop_joins_the_next_step():
    rows = WandbRows([{"_step": 5, "step": 5}])
    assert rows.of_evaluation(("validation", 5, 0), step=5) == 6
    assert rows.of_step(6) == 6
    # A row has one validation.
    assert rows.of_evaluation(("validation", 6, 0), step=6) == 7
    assert rows.of_evaluation(("other", 6, 0), step=6) == 7
    assert rows.of_step(7) == 7
    assert rows.of_step(9) == 9
    assert rows.of_evaluation(("validation", 9, 0), step=9) == 9


def test_an_evaluation_by_changed_rewards_is_another_one():
    changed = {**evaluated("test_before", 0), "eval/test_before/rewards_version": 1}
    history = [{"_step": 0, **evaluated("test_before", 0)}, {"_step": 4, "step": 4, **changed}]
    rows = WandbRows(history)
    assert rows.of_evaluation(("test_before", 0, 0), step=4) is None
    assert rows.of_evaluation(("test_before", 0, 1), step=4) is None
    assert rows.of_evaluation(("test_before", 0, 2), step=4) == 5
    assert rows.of_evaluation(("test_before", 0, 2), step=4) is None


def test_a_row_without_a_step_moves_later_steps():
    # The last process has only evaluated; then the run was extended.
    rows = WandbRows([{"_step": 5, "step": 5}, {"_step": 6, **evaluated("test_after", 4)}])
    assert [rows.of_step(step) for step in (5, 6, 7)] == [None, 7, 8]


def test_rows_that_the_server_lacks_are_logged_again():
    history = [{"_step": 2, "step": 2}, {"_step": 3, "step": 3, **evaluated("validation", 3)}]
    rows = WandbRows(history, first=3)
    assert [rows.of_step(step) for step in (2, 3)] == [None, 3]
    assert rows.of_evaluation(("validation", 3, 0), step=3) == 3


def test_without_files_the_server_has_the_steps_before_its_first_free_row():
    rows = WandbRows([], first=4, evaluated=[("validation", 3, 0), ("validation", 4, 0)])
    assert [rows.of_step(step) for step in (3, 4)] == [None, 4]
    assert rows.of_evaluation(("validation", 3, 0), step=4) is None
    assert rows.of_evaluation(("validation", 4, 0), step=4) == 4


def test_a_mark_is_in_the_row_of_the_step_to_come():
    rows = WandbRows([{"_step": 2, "step": 2}])
    assert rows.of_mark("changed", step=3) == 3
    assert rows.of_step(3) == 3
    assert rows.of_mark("changed", step=5) == 5
    assert rows.of_mark("changed", step=5) is None  # a resume repeats it
    assert rows.of_step(4) == 5
