"""Arithmetic of the deadline: which work still fits into the time that is left.

All clock readings are arguments: `now_s` is the time that the run has used, in seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.contracts.decisions import CHECKPOINT, EXIT, EXPORT, SYNC, VALIDATION, WorkDeadline
from pipeline.control.estimates import SAFETY, ShutdownEstimate, StepTimeEstimator

IDLE_SHARE = 0.02
"""Share of the budget that slack may leave unused."""
_CLOSE, _UNMEASURED = 0.9999, 1.5
_UNFORESEEN = 0.01
"""Share of the budget reserved for unforeseen delays."""


class BudgetTooSmallError(ValueError):
    """Not one step fits into the budget.

    Attributes:
        minimum_s: the smallest budget that is known to suffice.
    """

    def __init__(self, message: str, *, minimum_s: float) -> None:
        super().__init__(message)
        self.minimum_s = minimum_s


@dataclass
class Deadline:
    """Whether another step may start, and its size.

    A run of steps counts steps. A run with a time budget starts a step if the step and the shutdown
    after it fit into the remaining time: checkpoint, validation, export, final evaluations. Some
    slack is kept, but at most `IDLE_SHARE` of the budget or a step stays idle. Work that takes
    longer than expected uses the slack first and then shortens the final evaluation (see
    `evaluated_share`), which comes after the export.

    Attributes:
        steps: number of steps; None: the budget is time.
        time_s: seconds of the budget; None: the budget is steps.
        prompts: most and fewest prompts of a step.
        validates: whether a version is validated before its export.
        shutdown: seconds of each part of the shutdown.
        step_time: seconds of training steps.
        update_time: seconds of the updates in them.
        until_s: the deadline in seconds since 1970, if it was given as an instant.
    """

    steps: int | None
    time_s: float | None
    prompts: tuple[int, int] = (1, 1)
    validates: bool = False
    shutdown: ShutdownEstimate = field(default_factory=ShutdownEstimate)
    step_time: StepTimeEstimator = field(default_factory=StepTimeEstimator)
    update_time: StepTimeEstimator = field(default_factory=StepTimeEstimator)
    until_s: float | None = None

    def left_s(self, now_s: float) -> float:
        """Seconds until the deadline; infinite in a run of steps."""
        return float("inf") if self.time_s is None else self.time_s - now_s

    def recall(self, rows: Sequence[Mapping[str, Any]], *, sft_steps: int) -> None:
        """Adds the step times in the metrics of earlier processes."""
        for row in rows:
            phase = "sft" if row["step"] <= sft_steps else "grpo"
            planned = row.get("rollout/prompts_planned", self.prompts[0])
            share = 1.0 if phase == "sft" else planned / self.prompts[0]
            self.step_time.observe(row["time/step_s"], share=share, phase=phase)
            if phase == "grpo":
                self.update_time.observe(row["time/learn_s"], share=share)

    def extend(self, *, steps: int | None, seconds: float | None) -> None:
        """Adds to the budget, which is of steps or of seconds."""
        self.steps = None if self.steps is None else self.steps + (steps or 0)
        self.time_s = None if self.time_s is None else self.time_s + (seconds or 0.0)
        self.until_s = None if self.until_s is None else self.until_s + (seconds or 0.0)

    # --- another step

    def allows(self, step: int, now_s: float, *, phase: str = "grpo") -> bool:
        """Whether step number `step`, counted from 0, can finish in time."""
        if self.steps is not None:
            return step < self.steps
        return self.prompts_that_fit(now_s, phase=phase) > 0

    def prompts_that_fit(self, now_s: float, *, phase: str = "grpo") -> int:
        """Prompts of the largest step that can finish in time; 0: none can.

        A step of the SFT phase has one size.
        """
        most, fewest = self.prompts
        if phase == "sft":
            fewest = most
        for prompts in range(most, fewest - 1, -1):
            if self.missing_s(prompts, now_s, phase=phase) <= 0:
                return prompts
        return 0

    def missing_s(self, prompts: int, now_s: float, *, phase: str = "grpo") -> float:
        """Seconds that a step with this many prompts and the shutdown exceed the time left."""
        step_s = self.step_time.expected_s(share=prompts / self.prompts[0], phase=phase)
        return step_s + self.shutdown_s + self._slack_s(step_s) - self.left_s(now_s)

    def missing_for_update_s(self, sampled_s: float, now_s: float, *, share: float) -> float:
        """Seconds that the update of a sampled step and its export exceed the time left.

        Until an update was measured, it is assumed to take 1.5 times as long as sampling.
        """
        update_s = self.update_time.expected_s(share=share) or _UNMEASURED * sampled_s
        return update_s + self.shutdown_s - self.tests_s - self.left_s(now_s)

    def steps_left(
        self,
        now_s: float,
        validations: Callable[[int], int] = lambda _: 0,
        *,
        phase: str = "grpo",
    ) -> int:
        """Number of full steps that fit into the time left, at least 1.

        Args:
            now_s: the time used.
            validations: number of validations between that many steps, without the one after the
                last step.
            phase: of the steps.
        """
        step_s, between_s = self.step_time.expected_s(phase=phase), self.step_time.between_s
        free_s = self.left_s(now_s) - self.shutdown_s - self._slack_s(step_s + between_s)
        each_s = self.shutdown.part_s(VALIDATION)

        def too_many(steps: int) -> bool:
            needed_s = steps * step_s + (steps - 1) * between_s + validations(steps) * each_s
            return needed_s > free_s

        most = int((free_s + between_s) / (step_s + between_s)) if step_s > 0 else 1
        return max(1, bisect_right(range(1, most + 1), False, key=too_many))

    # --- the shutdown

    @property
    def shutdown_s(self) -> float:
        """Seconds after the last step, without slack."""
        validation_s = self.shutdown.part_s(VALIDATION) if self.validates else 0.0
        return validation_s + self.export_s + self.closing_s

    @property
    def export_s(self) -> float:
        """Expected seconds of an export."""
        return self.shutdown.part_s(EXPORT)

    @property
    def closing_s(self) -> float:
        """Seconds after the last step, without validation and export."""
        return self._writing_s + self.tests_s

    @property
    def _writing_s(self) -> float:
        """A checkpoint, loading the best version into the samplers, and the exit."""
        return self.shutdown.part_s(CHECKPOINT) + self.shutdown.part_s(SYNC) + self.exit_s

    @property
    def exit_s(self) -> float:
        """Seconds after the last record."""
        return self.shutdown.part_s(EXIT)

    @property
    def tests_s(self) -> float:
        """Seconds of the final evaluations."""
        return self.shutdown.tests_s(drift=self.step_time.drift)

    def _slack_s(self, step_s: float) -> float:
        assert self.time_s is not None
        uncertain_s = self.shutdown_s - self.exit_s
        wanted_s = (SAFETY - 1) * uncertain_s + _UNFORESEEN * self.time_s
        coarse_s = step_s + (self.shutdown.part_s(VALIDATION) if self.validates else 0.0)
        return min(wanted_s, max(0.0, IDLE_SHARE * self.time_s - coarse_s))

    # --- deadlines of work

    def reserve_for_export_s(self, *, tests: bool) -> float:
        """Seconds to reserve for a later export, with or without the evaluations after it."""
        needed_s = SAFETY * (self.export_s + self._writing_s)
        return needed_s + self.tests_s if tests else needed_s

    def reserving(self, seconds: float) -> WorkDeadline | None:
        """The deadline of work after which `seconds` are left; None in a run of steps."""
        if self.time_s is None:
            return None
        stopped_by_s = self.time_s - self.reserve_for_export_s(tests=False)
        return WorkDeadline(self.time_s - seconds, stopped_by_s)

    def has_time_for(self, seconds: float, now_s: float) -> bool:
        """Whether work of this duration leaves time for the whole end of the run."""
        return SAFETY * seconds + self.shutdown_s < self.left_s(now_s)

    def has_time_to_validate(self, now_s: float) -> bool:
        """Whether a validation leaves time for an export; tests can be shortened."""
        needed_s = SAFETY * self.shutdown.part_s(VALIDATION)
        return needed_s + self.reserve_for_export_s(tests=False) < self.left_s(now_s)

    def evaluated_share(self, now_s: float, *, reserved_s: float = 0.0) -> float:
        """Share of the test prompts that fits into the time left, at most 1.

        Args:
            now_s: the time used.
            reserved_s: seconds needed after the evaluations.
        """
        if self.time_s is None:
            return 1.0
        times = (self.left_s(now_s) - reserved_s) / max(self.tests_s, 1e-9)
        return 1.0 if times >= SAFETY else max(0.0, min(_CLOSE, times))
