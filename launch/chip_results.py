"""Results of `launch.doctor --chips`: lines of JSON from the processes that have the chips."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SPEED = "speed"
"""Check whose figures are the measured speeds of a chip."""
VALUES = "values"
"""Figure that holds the log-probs themselves, in the order of the rollouts' tokens."""


@dataclass(frozen=True)
class ChipResult:
    """The result of a check.

    Attributes:
        state: ok; skipped: it does not apply; fault: the chips computed something wrong, or failed.
        finding: what was found.
        figures: the numbers behind it, by name.
        check: its name.
        seconds: how long the check took.
    """

    state: Literal["ok", "skipped", "fault"]
    finding: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    check: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        """The result as a line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_line(line: str) -> ChipResult | None:
        """Reads the result of `line`; None: the line is something else, such as a log message."""
        try:
            return ChipResult(**json.loads(line))
        except (TypeError, ValueError):
            return None
