"""Estimates of time: the next training step, and the shutdown of the run.

Both start from an estimate and follow measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

from pipeline.contracts.decisions import VALIDATION

FIXED = 0.2
"""Share of a step's time that does not shrink with its prompts."""
SAFETY = 1.2
"""A part of the shutdown may take this many times its last measurement."""
_LAST, _STALL = 3, 1.5
_GROWTH = (0.67, 1.5)
_EVALUATION = " evaluation"
_START_S = 20.0
_BYTES_PER_S = 2e9


@dataclass
class StepTimeEstimator:
    """Seconds of the next training step.

    The median of the last three steps ignores a single stalled step; a trend over the last six
    steps is extrapolated.

    Attributes:
        estimate_s: seconds of a full step until one was measured.
        between_s: mean seconds between two steps without validations: checkpoints, exports.
    """

    estimate_s: float = 0.0
    between_s: float = 0.0
    _steps: list[float] = field(default_factory=list)
    _phase: str = ""
    _between: int = 0

    def observe(self, seconds: float, *, share: float = 1.0, phase: str = "grpo") -> None:
        """Adds a step with `share` of the usual prompts; another phase starts a new series."""
        if phase != self._phase:
            self._steps, self._phase = [], phase
        self._steps.append(seconds / _cost(share))

    def observe_between(self, seconds: float) -> None:
        """Adds the time between two steps, without validations."""
        self._between += 1
        self.between_s += (seconds - self.between_s) / self._between

    def expected_s(self, *, share: float = 1.0, phase: str = "grpo") -> float:
        """Seconds of the next step if it has `share` of the usual prompts."""
        if phase != self._phase or not self._steps:
            return self.estimate_s * _cost(share)
        now, before = self._steps[-_LAST:], self._steps[-2 * _LAST : -_LAST]
        seconds = median_high(now)
        if before:
            growth = (seconds / max(median_high(before), 1e-9)) ** (1 / _LAST)
            # The median of the last three steps is centred two steps before the next one.
            seconds *= min(max(growth, _GROWTH[0]), _GROWTH[1]) ** 2
        return seconds * _cost(share)

    @property
    def drift(self) -> float:
        """Duration of the last steps relative to the first ones."""
        if not self._steps:
            return 1.0
        now, first = median_high(self._steps[-_LAST:]), self._steps[:_LAST]
        middle = max(median_high(first), 1e-9)
        # The drift may start with the first step, or the first step may be a stall.
        began = min(first) if now > middle else min(max(first), _GROWTH[1] * middle)
        return now / max(began, 1e-9)


def _cost(share: float) -> float:
    return FIXED + (1 - FIXED) * share


@dataclass
class ShutdownEstimate:
    """Seconds of each part of the shutdown: validation, export, checkpoint, tests, exit.

    Attributes:
        estimates: seconds of parts that were not measured yet.
        measured: all measurements of each part, oldest first.
    """

    estimates: dict[str, float] = field(default_factory=dict)
    measured: dict[str, list[float]] = field(default_factory=dict)

    def observe(self, part: str, seconds: float) -> None:
        """Adds a measurement."""
        self.measured.setdefault(part, []).append(seconds)

    def read(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Adds the measurements of the journal's `reserved` entries."""
        for entry in entries:
            self.observe(entry["reason"], entry["seconds"])

    def part_s(self, part: str) -> float:
        """Expected seconds of a part."""
        return _next(self.measured[part]) if part in self.measured else self.estimates.get(part, 0)

    def tests_s(self, *, drift: float = 1.0) -> float:
        """Expected seconds of the final evaluations, without the validation split.

        Answers get longer or shorter during a run. The trend of the validation times tells how
        much; without a validation split `drift` does.
        """
        validations = self.measured.get(VALIDATION)
        if validations:
            drift = _next(validations) / max(validations[0], 1e-9)
        return drift * sum(self.part_s(part) for part in self._tests)

    @property
    def _tests(self) -> list[str]:
        parts = {*self.estimates, *self.measured} - {VALIDATION}
        return sorted(part for part in parts if part.endswith(_EVALUATION))


def _next(seconds: Sequence[float]) -> float:
    """The last measurement, bounded by the recent ones: a stall is not expected again."""
    return min(seconds[-1], _STALL * median_high(seconds[-_LAST:]))


def least_run_s(weight_bytes: int) -> float:
    """Lower bound, in seconds, of any run of a model of this size.

    Processes start and compile; the weights are read once, and written and read again for the first
    export and for a better one, at the rate of a fast disk.
    """
    return _START_S + 5 * weight_bytes / _BYTES_PER_S
