"""Settings of faults: processes that die or hang."""

from __future__ import annotations

from pydantic import Field

from configs.base import Table


class Faults(Table):
    """Restarts of processes that die or hang."""

    restarts: int = Field(
        3,
        ge=0,
        description="restarts of a process without a new training step in between; one more death "
        "ends the run, with a checkpoint if the learner lives",
    )
    silent_s: float = Field(
        60.0,
        ge=5.0,
        description="seconds without a heartbeat after which a process is ended and restarted; ten "
        "times as many while it loads or compiles",
    )
    stuck_s: float = Field(
        3600.0,
        ge=5.0,
        description="seconds without progress in a phase after which a process is ended and "
        "restarted; loading, compiling and writing files have no such limit",
    )
