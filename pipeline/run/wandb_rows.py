"""The numbers of the rows in the history of a W&B run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

STEP = "step"
"""Training step of a row: the axis of all metrics but those of evaluations."""
VERSION = "version"
"""`eval/NAME/version`: the policy version of an evaluation, the axis of its metrics."""
REWARDS_VERSION = "rewards_version"
"""`eval/NAME/rewards_version`: see `history.rewards_version`; absent for the first rewards."""

Evaluation = tuple[str, int, int]
"""Name, policy version and version of the rewards."""


class WandbRows:
    """Chooses the row, W&B's `_step`, of each step and evaluation.

    W&B takes rows in ascending order only, and a row of an earlier process takes nothing more. The
    row of a training step has its number, and holds the evaluations that follow the step. Where an
    earlier process has ended in between, these are in the next row that is free; a row holds one
    evaluation of a name. So a row can have a higher number than its step or version.

    What W&B has already is not logged again: a step or an evaluation that a resumed run repeats
    keeps its first values. An evaluation by changed rewards is another one.

    Args:
        history: rows that W&B has, as far as known, by `_step`.
        first: the first number that is free; None: the one after `history`.
        evaluated: evaluations that W&B has if `history` is empty and `first` is not 0.
    """

    def __init__(
        self,
        history: Iterable[Mapping[str, Any]],
        *,
        first: int | None = None,
        evaluated: Iterable[Evaluation] = (),
    ) -> None:
        known = [row for row in history if first is None or row["_step"] < first]
        last = max((row["_step"] for row in known), default=-1)
        self._row = last + 1 if first is None else first
        steps = [row[STEP] for row in known if STEP in row]
        self.step = int(max(steps, default=self._row - 1))
        self._holds_step = False
        self._names: set[str] = set()
        self._marks: set[tuple[str, int]] = set()
        self._evaluated = {found for row in known for found in _evaluations(row)}
        if not known:
            self._evaluated |= {one for one in evaluated if one[1] <= self.step}

    def of_step(self, step: int) -> int | None:
        """The row of a training step; None: W&B has the step."""
        if step <= self.step:
            return None
        self._open(max(step, self._row + self._holds_step))
        self.step, self._holds_step = step, True
        return self._row

    def of_evaluation(self, evaluation: Evaluation, *, step: int) -> int | None:
        """The row of an evaluation after `step` steps; None: W&B has it."""
        if evaluation in self._evaluated:
            return None
        self._evaluated.add(evaluation)
        name, *_ = evaluation
        self._open(max(step, self._row + (name in self._names)))
        self._names.add(name)
        return self._row

    def of_mark(self, metric: str, *, step: int) -> int | None:
        """The row of a mark of a step, or else the row that is not complete; None: it is logged."""
        if (metric, step) in self._marks:
            return None
        self._marks.add((metric, step))
        self._open(max(step, self._row))
        return self._row

    def _open(self, row: int) -> None:
        if row > self._row:
            self._row, self._holds_step, self._names = row, False, set()


def _evaluations(row: Mapping[str, Any]) -> Iterable[Evaluation]:
    for key, value in row.items():
        if key.startswith("eval/") and key.endswith(f"/{VERSION}"):
            name = key.split("/")[1]
            yield name, int(value), int(row.get(f"eval/{name}/{REWARDS_VERSION}", 0))
