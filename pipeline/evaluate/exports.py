"""The export of a run with a budget of time: there from the first evaluation on, always the best.

At first it is the untrained policy's, or that of a run of steps that goes on, which also tells how
long an export takes; after a better validation it is replaced, at once or a little later, but
before the deadline in every case.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeline.contracts.adapters import AdapterRef
from pipeline.contracts.clock import Stopwatch
from pipeline.control.deadline import Deadline
from pipeline.control.reserve import EXPORT
from pipeline.evaluate.schedule import EvaluationSchedule
from pipeline.rollout.team import Team
from pipeline.run.records import Records

COMPARED = 32
"""Answers whose log-probs an export has to reproduce."""
SHARE = 0.05
"""Exports during the run may take this share of the time; more only when it runs out."""
_NEAR_EXPORTS = 4


class Exports:
    """Keeps `export/` at the best version.

    Args:
        examiner: knows the best version, and answers to compare log-probs on.
        team: who exports.
        records: where it is written down, and found again after a resume.
        deadline: is told how long exports take.
    """

    def __init__(
        self, examiner: EvaluationSchedule, *, team: Team, records: Records, deadline: Deadline
    ) -> None:
        self._examiner = examiner
        self._team = team
        self._records = records
        self._deadline = deadline
        self._used_s = 0.0
        self._journaled = list(records.folder.events("exported"))

    @property
    def version(self) -> int | None:
        """The version in `export/`; None: there is none."""
        folder = self._records.folder.export
        there = self._journaled and folder.is_dir()
        return int(self._journaled[-1]["version"]) if there else None

    @property
    def adapter(self) -> str | None:
        """Hash of the adapter in `export/`; None: there is none.

        A version that was made again after its checkpoint was lost need not be the same.
        """
        return None if self.version is None else str(self._journaled[-1]["adapter_sha256"])

    @property
    def pending(self) -> bool:
        """Whether a better version than the exported one is known."""
        best = self._examiner.best
        return best is not None and best["adapter_sha256"] != self.adapter

    @property
    def measured(self) -> bool:
        """Whether there is an export, and its adapter was evaluated."""
        evaluated = self._records.folder.events("evaluated")
        return self.adapter in {entry["adapter_sha256"] for entry in evaluated}

    @property
    def in_force(self) -> bool:
        """Whether the exported adapter is the one that samplers have."""
        assert self._team.published is not None
        return self._team.published.sha256 == self.adapter

    async def rehearse(self) -> None:
        """Exports the policy in force if there is no export and no version is known to be better.

        The untrained one is measured by then. One that a run of steps has left behind may not be,
        and is better than none.
        """
        if self.version is None and not self.pending:
            await self.export("current", reason="rehearsal")

    async def follow(self, step: int) -> None:
        """Exports the best version if it is not there yet, unless that is better done later."""
        if not self.pending:
            return
        took_s = self._deadline.export_s
        near = self._deadline.left_s - self._deadline.end_s < _NEAR_EXPORTS * took_s
        cheap = self._used_s + took_s <= SHARE * self._deadline.clock.elapsed_s
        if near or cheap or self.version is None:
            best = self._examiner.best
            assert best is not None
            which: AdapterRef = "current" if best["step"] == step else "best"
            await self.export(which, reason="better")

    async def export(self, which: AdapterRef, *, reason: str) -> None:
        """Replaces what is exported and measures how long that takes."""
        watch = Stopwatch(self._deadline.clock.now)
        examples = await self._examiner.examples(COMPARED)
        report = await self._team.learner.export(
            str(self._records.folder.export), examples, which=which
        )
        best, published = self._examiner.best, self._team.published
        assert published is not None
        exported = best["adapter_sha256"] if which == "best" and best else published.sha256
        facts: dict[str, Any] = {
            **asdict(report),
            "adapter_sha256": exported,
            "seconds": watch.total_s,
            "reason": reason,
        }
        self._journaled.append(facts)
        self._used_s += watch.total_s if reason != "rehearsal" else 0.0
        self._deadline.reserve.observe(EXPORT, watch.total_s)
        if self._deadline.time_s is not None:
            self._records.folder.journal(
                "reserved",
                reason=EXPORT,
                seconds=watch.total_s,
                elapsed_s=self._deadline.clock.elapsed_s,
            )
        self._records.exported(facts)
