"""How long the next step will take, from how long the last ones took."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median_high

FIXED = 0.2
"""Share of a step's time that does not shrink with its prompts."""
_LAST = 3
_GROWTH = (0.67, 1.5)


@dataclass
class Pace:
    """Seconds of the steps so far.

    A stalled step is one outlier among the last three and is not believed; steps that become longer
    and longer, or shorter and shorter, are, and that is thought to go on.

    Attributes:
        estimate_s: what a step of full size is taken for until one was measured.
        between_s: mean seconds between a step and the next, validations not counted: checkpoints,
            exports.
    """

    estimate_s: float = 0.0
    between_s: float = 0.0
    _steps: list[float] = field(default_factory=list)
    _kind: str = ""
    _between: int = 0

    def observe(self, seconds: float, *, share: float = 1.0, kind: str = "grpo") -> None:
        """Takes note of a step with `share` of the usual prompts; another kind begins anew."""
        if kind != self._kind:
            self._steps, self._kind = [], kind
        self._steps.append(seconds / _cost(share))

    def observe_between(self, seconds: float) -> None:
        """Takes note of what came after a step, its validation not counted."""
        self._between += 1
        self.between_s += (seconds - self.between_s) / self._between

    def expected_s(self, *, share: float = 1.0, kind: str = "grpo") -> float:
        """Seconds of the next step, if it has `share` of the usual prompts."""
        if kind != self._kind or not self._steps:
            return self.estimate_s * _cost(share)
        now, before = self._steps[-_LAST:], self._steps[-2 * _LAST : -_LAST]
        seconds = median_high(now)
        if before:
            growth = (seconds / max(median_high(before), 1e-9)) ** (1 / _LAST)
            # The middle one of the last three lies two steps back from the next.
            seconds *= min(max(growth, _GROWTH[0]), _GROWTH[1]) ** 2
        return seconds * _cost(share)

    @property
    def drift(self) -> float:
        """How many times as long as the first steps the last ones took."""
        if not self._steps:
            return 1.0
        now, first = median_high(self._steps[-_LAST:]), self._steps[:_LAST]
        middle = max(median_high(first), 1e-9)
        # It may have begun with the first step, which may have been a stall.
        began = min(first) if now > middle else min(max(first), _GROWTH[1] * middle)
        return now / max(began, 1e-9)


def _cost(share: float) -> float:
    return FIXED + (1 - FIXED) * share
