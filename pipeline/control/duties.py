"""Duties: decisions on work between training steps, and the run status that they depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.contracts.adapters import AdapterRef
from pipeline.contracts.decisions import JournalEntry, WorkDeadline
from pipeline.contracts.steering import Request
from pipeline.control.deadline import BudgetTooSmallError

DutyKind = Literal[
    "check_parity",
    "evaluate_before",
    "validate",
    "recover_best",
    "repair_answers",
    "export",
    "checkpoint",
    "load_best",
    "test",
    "refuse",
    "summarize",
    "steer",
    "export_copy",
    "stop",
]


PHASES: dict[DutyKind, str] = {
    "check_parity": "calibration",
    "evaluate_before": "evaluation",
    "validate": "evaluation",
    "recover_best": "checkpoint",
    "repair_answers": "evaluation",
    "export": "export",
    "checkpoint": "checkpoint",
    "load_best": "sync",
    "test": "evaluation",
    "refuse": "coordination",
    "summarize": "coordination",
    "steer": "coordination",
    "export_copy": "export",
    "stop": "coordination",
}
"""Phase of the run during each duty."""

NAMES: dict[DutyKind, str] = {
    "evaluate_before": "the evaluation before training",
    "validate": "the validation",
    "repair_answers": "the repeated validation",
}
"""What the console calls a duty that is abandoned, where its kind does not say it."""


@dataclass(frozen=True)
class Duty:
    """A decision: work other than a training step.

    Attributes:
        kind: what to do.
        deadline: when it is abandoned; None: never.
        adapter: export: which adapter.
        reason: export: why, for the journal.
        share: test: share of the prompts to evaluate.
        error: refuse: the error to raise.
        request: steer: the request that is in force now, or refused.
        journal: new journal entries.
    """

    kind: DutyKind
    deadline: WorkDeadline | None = None
    adapter: AdapterRef = "current"
    reason: str = ""
    share: float = 1.0
    error: BudgetTooSmallError | None = None
    request: Request | None = None
    journal: tuple[JournalEntry, ...] = ()


@dataclass(frozen=True)
class Exported:
    """What the export folder holds.

    Attributes:
        version: policy version.
        adapter_sha256: hash of its adapter.
        evaluated: whether this adapter was evaluated.
    """

    version: int
    adapter_sha256: str
    evaluated: bool


@dataclass(frozen=True)
class BestVersion:
    """The best version by validation."""

    step: int
    adapter_sha256: str


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, as far as decisions depend on it.

    Attributes:
        step: training steps done.
        validated: steps with a validation that counts.
        best: the best of them.
        exported: content of the export folder; None: it is empty.
        loaded_sha256: hash of the adapter that the samplers hold.
        tested: whether the final evaluation measured the version to export.
        requests: of `launch.control`, not taken up yet, oldest first.
    """

    step: int
    validated: frozenset[int] = frozenset()
    best: BestVersion | None = None
    exported: Exported | None = None
    loaded_sha256: str | None = None
    tested: bool = False
    requests: tuple[Request, ...] = ()

    @property
    def export_is_behind(self) -> bool:
        """Whether the best version is not the exported one.

        Compares hashes: a version that is trained again after its checkpoint was lost may differ.
        """
        exported = None if self.exported is None else self.exported.adapter_sha256
        return self.best is not None and self.best.adapter_sha256 != exported

    @property
    def export_is_loaded(self) -> bool:
        """Whether the samplers hold the exported adapter."""
        return self.exported is not None and self.exported.adapter_sha256 == self.loaded_sha256
