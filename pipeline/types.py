"""Values that the parts of the pipeline pass on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

TrainingPhase = Literal["sft", "grpo"]
"""A training phase of the run."""

ShowProgress = Callable[[int, int], None]
"""Takes how much is done, and of how much."""

Measure = Callable[[str, float], None]
"""Takes a part of the end of the run and the seconds that it took; see `pipeline.deadline`."""

_LEAST_STOPPING_S = 3.0


@dataclass(frozen=True)
class WorkDeadline:
    """Deadline of work that can be abandoned.

    Attributes:
        until_s: seconds on the run's clock at which the work is abandoned.
        stopped_by_s: seconds on the run's clock by which abandoned work should have stopped.
    """

    until_s: float
    stopped_by_s: float

    def stopping_s(self, now_s: float) -> float:
        """Seconds that work abandoned at `now_s` may take to stop."""
        return max(_LEAST_STOPPING_S, self.stopped_by_s - now_s)


@dataclass(frozen=True)
class TrainStep:
    """A training step that is about to start.

    Attributes:
        number: counted from 0; also the policy version that samples.
        phase: supervised or GRPO.
        prompts: prompts of this step; fewer than configured where time is short.
        rate: learning rate, where it decays with the time used; None: the learner's schedule.
        deadline: when sampling and scoring are abandoned; None: never.
    """

    number: int
    phase: TrainingPhase = "grpo"
    prompts: int = 0
    rate: float | None = None
    deadline: WorkDeadline | None = None
