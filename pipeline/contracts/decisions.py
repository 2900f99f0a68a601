"""Decisions as values, and protocols of the journal and the run history.

The controller decides (`control.controller`); the coordinator journals each decision and acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

TrainingPhase = Literal["sft", "grpo"]
"""A training phase of the run."""

EXPORT, CHECKPOINT, SYNC, EXIT = "export", "checkpoint", "sync", "exit"
VALIDATION = "validation evaluation"
"""Parts of the shutdown whose seconds are estimated, then measured."""


_LEAST_STOPPING_S = 3.0


def evaluation_part(name: str) -> str:
    """The part of the shutdown that evaluates a split."""
    return f"{name} evaluation"


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
class JournalEntry:
    """A line of the journal, and the sentence that the console shows; None: it shows nothing."""

    event: str
    facts: Mapping[str, Any]
    text: str | None = None


class Decision(Protocol):
    """A decision of the controller."""

    @property
    def journal(self) -> tuple[JournalEntry, ...]:
        """What is new in it: earlier processes of the run did not journal it."""


@dataclass(frozen=True)
class TrainStep:
    """A decision: train one more step.

    Attributes:
        number: counted from 0; also the policy version that samples.
        phase: supervised or GRPO.
        prompts: prompts of this step; fewer than configured where time is short.
        rate: learning rate, where the schedule follows the clock; None: the learner's schedule.
        lr: peak of the learner's schedule; None: `learner.lr`.
        kl_coef: coefficient of the KL term; None: `learner.kl_coef`.
        deadline: when sampling and scoring are abandoned; None: never.
        journal: new journal entries.
    """

    number: int
    phase: TrainingPhase = "grpo"
    prompts: int = 0
    rate: float | None = None
    lr: float | None = None
    kl_coef: float | None = None
    deadline: WorkDeadline | None = None
    journal: tuple[JournalEntry, ...] = ()


@dataclass(frozen=True)
class RemainingTime:
    """Training that is left: `steps` in a run of steps, else `seconds` before the shutdown."""

    steps: int | None
    seconds: float

    def steps_of(self, step_s: float) -> float:
        """Steps that are left if each takes `step_s` seconds."""
        return self.seconds / step_s if self.steps is None else float(self.steps)


@dataclass(frozen=True)
class UpdateStart:
    """A decision: update the policy with the rollouts of a step.

    Attributes:
        ahead: the next step, if its rollouts are sampled during the update.
        left: training that is left after this step, by the clock before its update.
        journal: new journal entries.
    """

    ahead: TrainStep | None
    left: RemainingTime
    journal: tuple[JournalEntry, ...] = field(default=())


class StepGate(Protocol):
    """Decides whether a step may start a further sampling round."""

    def __call__(self, step: int) -> bool:
        """Whether there is time for another step of this number."""


class Measure(Protocol):
    """Receives how long a part of the shutdown took."""

    def __call__(self, part: str, seconds: float) -> None:
        """Records a measurement."""


ShowProgress = Callable[[int, int], None]
"""Takes how much is done, and of how much."""


class Display(Protocol):
    """The console of a run."""

    def say(self, text: str) -> None:
        """Shows a line."""

    def activity(self, what: str, unit: str) -> AbstractContextManager[ShowProgress]:
        """Shows the progress of its block.

        Args:
            what: is being done, or the process that does it.
            unit: of the amount, in the plural.
        """


class DecisionLog(Display, Protocol):
    """Journal and console of a run."""

    def events(self, event: str) -> Iterator[dict[str, Any]]:
        """Journal entries of one kind, oldest first, those of earlier processes included."""

    def journal(self, event: str, **facts: Any) -> None:
        """Appends an entry to the journal."""

    def event(self, event: str, text: str, **facts: Any) -> None:
        """Appends an entry to the journal and shows `text` on the console."""

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Replaces `plan.json`."""


class RunHistory(Protocol):
    """What earlier processes of a run recorded."""

    @property
    def path(self) -> Path:
        """The run folder."""

    @property
    def holds_run(self) -> bool:
        """Whether a process of the run has started training."""

    @property
    def saved_config(self) -> dict[str, Any]:
        """The configuration that the run folder holds."""

    @property
    def summary(self) -> dict[str, Any] | None:
        """Content of `summary.json`; None: the run has not ended."""

    @property
    def recorded_used_s(self) -> float:
        """Seconds used, as last recorded by a running process."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of the steps, oldest first."""

    def entries(self) -> Iterator[dict[str, Any]]:
        """All entries of the journal, oldest first."""

    def events(self, event: str) -> Iterator[dict[str, Any]]:
        """Journal entries of one kind, oldest first."""
