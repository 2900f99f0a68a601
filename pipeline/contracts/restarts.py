"""How often something that died is restarted, and after which pause."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass
class RestartBudget:
    """A number of restarts, which progress renews; the pauses before them grow.

    Attributes:
        most: restarts without progress in between.
        used: restarts since the last progress.
    """

    most: int
    used: int = 0

    def next_pause_s(self) -> float | None:
        """Uses a restart: the seconds to wait before it; None: none is left."""
        if self.used >= self.most:
            return None
        self.used += 1
        return min(_FIRST_PAUSE_S * 4.0 ** (self.used - 1), _LONGEST_PAUSE_S)

    def renew(self) -> None:
        """Notes progress."""
        self.used = 0
