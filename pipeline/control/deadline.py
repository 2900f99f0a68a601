"""Time: how much is used, whether another step can be finished, what a step spends.

Pure control plane: every clock is given. What the end of a run needs stands in reserve.py, how long
a step takes in pace.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pipeline.contracts.clock import Clock
from pipeline.control.pace import Pace
from pipeline.control.reserve import CHECKPOINT, EXIT, EXPORT, SAFETY, SYNC, VALIDATION, Reserve

IDLE_SHARE = 0.02
"""Share of the budget that caution may leave unused."""
_CLOSE, _UNMEASURED = 0.9999, 1.5
_LEAST_ENDING_S = 3.0
_UNFORESEEN = 0.01
"""Share of the budget kept for what nothing else is kept for."""


class BudgetTooSmallError(ValueError):
    """Not one step fits into the budget.

    Attributes:
        minimum_s: the smallest budget that is known to do.
    """

    def __init__(self, message: str, *, minimum_s: float) -> None:
        super().__init__(message)
        self.minimum_s = minimum_s


@dataclass
class Deadline:
    """Whether another step may start, and how large it may be.

    A run of steps counts steps and asks no clock. A run with a budget of time starts a step if the
    step, as the last ones went, and all that comes after the last step fit into what is left: a
    checkpoint, the validation of what was learned, its export, the evaluations. Some slack is kept,
    but never so much that more than `IDLE_SHARE` of the budget or a step would be idle. What takes
    longer than expected costs that slack first and then the length of the last evaluation (see
    `evaluated_share`), which comes after the export.

    Attributes:
        clock: time used.
        steps: end after this many steps; None: no such bound.
        time_s: end within this time; None: no such bound.
        prompts: in a step, at most and at least.
        validates: whether a version is validated before it is exported.
        reserve: what the end needs.
        pace: what steps take.
        updates: what the updates among that take.
        until_s: the deadline in seconds since 1970, where it was given as such.
    """

    clock: Clock
    steps: int | None
    time_s: float | None
    prompts: tuple[int, int] = (1, 1)
    validates: bool = False
    reserve: Reserve = field(default_factory=Reserve)
    pace: Pace = field(default_factory=Pace)
    updates: Pace = field(default_factory=Pace)
    until_s: float | None = None
    _keep_s: float | None = field(default=None, init=False)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; without one there is no end to them."""
        return float("inf") if self.time_s is None else self.time_s - self.clock.elapsed_s

    def allows(self, step: int, *, kind: str = "grpo") -> bool:
        """Whether step number `step`, counted from 0, can be finished in time."""
        if self.steps is not None:
            return step < self.steps
        return self.size(kind=kind) > 0

    def size(self, *, kind: str = "grpo") -> int:
        """Prompts of the largest step that can be finished in time; 0: none can.

        A step of the warm start has no prompts and is whole or not at all.
        """
        most, fewest = self.prompts
        if kind == "sft":
            fewest = most
        for prompts in range(most, fewest - 1, -1):
            if self.missing_s(prompts, kind=kind) <= 0:
                return prompts
        return 0

    def missing_s(self, prompts: int, *, kind: str = "grpo") -> float:
        """Seconds that are missing for a step of so many prompts and the end after it."""
        step_s = self.pace.expected_s(share=prompts / self.prompts[0], kind=kind)
        return step_s + self.end_s + self._slack_s(step_s) - self.left_s

    def missing_for_update_s(self, sampled_s: float, *, share: float) -> float:
        """Seconds that are missing for the update of a step that was sampled, and for its export.

        Until an update was measured it is taken to need half as long again as sampling did.
        """
        update_s = self.updates.expected_s(share=share) or _UNMEASURED * sampled_s
        return update_s + self.end_s - self.tests_s - self.left_s

    def recall(self, rows: Sequence[Mapping[str, Any]], *, sft_steps: int) -> None:
        """Takes note of what earlier processes' metrics say of the time of steps."""
        for row in rows:
            kind = "sft" if row["step"] <= sft_steps else "grpo"
            planned = row.get("rollout/prompts_planned", self.prompts[0])
            share = 1.0 if kind == "sft" else planned / self.prompts[0]
            self.pace.observe(row["time/step_s"], share=share, kind=kind)
            if kind == "grpo":
                self.updates.observe(row["time/learn_s"], share=share)

    def steps_left(
        self, validations: Callable[[int], int] = lambda _: 0, *, kind: str = "grpo"
    ) -> int:
        """How many further steps of full size fit in as things are, at least 1.

        Args:
            validations: how many are due between so many steps, what comes after the last of them
                not counted.
            kind: of steps.
        """
        step_s, between_s = self.pace.expected_s(kind=kind), self.pace.between_s
        free_s = self.left_s - self.end_s - self._slack_s(step_s + between_s)
        each_s = self.reserve.part_s(VALIDATION)

        def too_many(steps: int) -> bool:
            needed_s = steps * step_s + (steps - 1) * between_s + validations(steps) * each_s
            return needed_s > free_s

        most = int((free_s + between_s) / (step_s + between_s)) if step_s > 0 else 1
        return max(1, bisect_right(range(1, most + 1), False, key=too_many))

    @property
    def end_s(self) -> float:
        """What comes after a step that is the last one, slack not included."""
        validation_s = self.reserve.part_s(VALIDATION) if self.validates else 0.0
        return validation_s + self.export_s + self.closing_s

    @property
    def export_s(self) -> float:
        """Seconds of an export as it was measured."""
        return self.reserve.part_s(EXPORT)

    @property
    def closing_s(self) -> float:
        """What comes after a step that is the last one, but for validation and export."""
        return self._writing_s + self.tests_s

    @property
    def _writing_s(self) -> float:
        """A checkpoint, the best version's way to the samplers, and the end of the process."""
        return self.reserve.part_s(CHECKPOINT) + self.reserve.part_s(SYNC) + self.exit_s

    @property
    def exit_s(self) -> float:
        """Seconds of what comes after the last record."""
        return self.reserve.part_s(EXIT)

    @property
    def tests_s(self) -> float:
        """Seconds of the evaluations at the end."""
        return self.reserve.tests_s(drift=self.pace.drift)

    def _slack_s(self, step_s: float) -> float:
        assert self.time_s is not None
        uncertain_s = self.end_s - self.exit_s
        wanted_s = (SAFETY - 1) * uncertain_s + _UNFORESEEN * self.time_s
        coarse_s = step_s + (self.reserve.part_s(VALIDATION) if self.validates else 0.0)
        return min(wanted_s, max(0.0, IDLE_SHARE * self.time_s - coarse_s))

    # --- what must not be begun, or not be waited for, any more

    def keep_for_export_s(self, *, tests: bool) -> float:
        """What an export needs that is still to come, with or without the evaluations after it."""
        needed_s = SAFETY * (self.export_s + self._writing_s)
        return needed_s + self.tests_s if tests else needed_s

    def has_time_to_validate(self) -> bool:
        """Whether a validation leaves room for an export after it; tests can be shortened."""
        needed_s = SAFETY * self.reserve.part_s(VALIDATION) + self.keep_for_export_s(tests=False)
        return needed_s < self.left_s

    def evaluated_share(self, *, keep_s: float = 0.0) -> float:
        """Share of the test prompts that there is time for, at most 1; not 1 if that is close.

        Args:
            keep_s: what is needed after the evaluations.
        """
        if self.time_s is None:
            return 1.0
        times = (self.left_s - keep_s) / max(self.tests_s, 1e-9)
        return 1.0 if times >= SAFETY else max(0.0, min(_CLOSE, times))

    @contextmanager
    def keeping(self, seconds: float) -> Iterator[None]:
        """What is waited for meanwhile is abandoned when only `seconds` are left."""
        before, self._keep_s = self._keep_s, seconds
        try:
            yield
        finally:
            self._keep_s = before

    def patience_s(self) -> float | None:
        """How long the current work may still be waited for; None: as long as it takes."""
        if self.time_s is None or self._keep_s is None:
            return None
        return max(0.0, self.left_s - self._keep_s)

    def ending_s(self) -> float:
        """How long what was abandoned may take to end, before an export that may be to come."""
        return max(_LEAST_ENDING_S, self.left_s - self.keep_for_export_s(tests=False))
