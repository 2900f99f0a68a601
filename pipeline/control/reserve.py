"""What the end of a run needs: seconds of each part, estimated first, then measured.

The journal's `reserved` entries are the measurements; a resumed run reads them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

SAFETY = 1.2
"""What was measured may take this much longer the next time."""
EXPORT, CHECKPOINT, SYNC, EXIT = "export", "checkpoint", "sync", "exit"
VALIDATION = "validation evaluation"
_EVALUATION = " evaluation"
_LAST, _STALL = 3, 1.5


@dataclass
class Reserve:
    """Seconds by part of the end.

    Attributes:
        estimates: what parts are taken for until they were measured.
        measured: what each part took, each time it was done.
    """

    estimates: dict[str, float] = field(default_factory=dict)
    measured: dict[str, list[float]] = field(default_factory=dict)

    def observe(self, part: str, seconds: float) -> None:
        """Takes note of how long a part took."""
        self.measured.setdefault(part, []).append(seconds)

    def read(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Takes note of what the journal's `reserved` entries say."""
        for entry in entries:
            self.observe(entry["reason"], entry["seconds"])

    def part_s(self, part: str) -> float:
        """Seconds that a part is expected to take."""
        return _next(self.measured[part]) if part in self.measured else self.estimates.get(part, 0)

    def tests_s(self, *, drift: float = 1.0) -> float:
        """Seconds of the evaluations at the end, the one of the validation split not among them.

        Answers become longer or shorter during a run: where the validation split is read, its times
        say by how much, else `drift` does.
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
    """As long as the last time, unless that was out of all proportion to the times before."""
    return min(seconds[-1], _STALL * median_high(seconds[-_LAST:]))


_START_S = 20.0
_BYTES_PER_S = 2e9


def least_run_s(weight_bytes: int) -> float:
    """Seconds that no run of a model of this size can do without: a bound, not a prediction.

    Processes start and compile; the weights are read once, and written and read again for the first
    export and for a better one, at the pace of a fast disk.
    """
    return _START_S + 5 * weight_bytes / _BYTES_PER_S


def evaluation(name: str) -> str:
    """The part that is the evaluation of a split."""
    return f"{name}{_EVALUATION}"
