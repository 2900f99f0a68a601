"""Settings of faults: processes that die or hang."""

from __future__ import annotations

from pydantic import Field

from configs.base import Table


class Faults(Table):
    """Restarts of a run whose process, or one of its processes, dies or hangs."""

    restarts: int = Field(
        3,
        ge=0,
        description="restarts of the run without a new training step in between; one more death or "
        "hang ends it",
    )
    stuck_s: float | None = Field(
        None,
        ge=5.0,
        description="seconds without progress (a step, a segment, a micro-batch, a call of a "
        "reward) after which the run is ended and started again; at least 1800 while it loads, "
        "compiles or writes files. Default: the largest of 300, ten times the longest step and "
        "twice the time limit of a reward",
    )
