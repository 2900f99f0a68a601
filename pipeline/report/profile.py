"""Profiles of training steps: traces of the devices, and a timeline of all processes.

The learner's and each sampler's process writes a JAX profiler trace. The phases of all processes,
which the ledger counts, become a timeline on one clock in Chrome's trace format, which Perfetto
opens: https://ui.perfetto.dev
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.contracts.phases import Span
from pipeline.contracts.record_files import write_atomically
from pipeline.rollout.workers import Workers
from pipeline.run.ledger import Ledger
from pipeline.run.records import Records

FOLDER, TIMELINE = "profile", "timeline.json"
_STEPS = "steps"
_US = 1e6


class Profiler:
    """Profiles the training steps that `profile.steps` names; their results do not change.

    Args:
        steps: first and last, counted from 1; None: no profile.
        workers: trace their processes.
        ledger: has the phases of all processes.
        records: of the run, in whose folder the profile is.
    """

    def __init__(
        self,
        steps: tuple[int, int] | None,
        *,
        workers: Workers,
        ledger: Ledger,
        records: Records,
    ) -> None:
        self._steps, self._folder = steps, records.folder.path / FOLDER
        self._workers, self._ledger, self._log = workers, ledger, records
        self._marks: list[Span] = []
        self._began_s: float | None = None

    async def begin(self, step: int) -> None:
        """Begins the profile, if this is its first step in this process.

        Args:
            step: that begins now, counted from 1.
        """
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            return
        if self._ledger.recorded is None:
            self._ledger.recorded = {}
            self._report(await self._workers.start_traces(self._folder))
        self._began_s = self._ledger.phases.now()

    async def end(self, step: int) -> None:
        """Ends the profile, if this was its last step.

        Args:
            step: that has ended, of which the ledger has all phases.
        """
        if self._steps is None or self._began_s is None:
            return
        self._marks.append(Span(f"step {step}", self._began_s, self._ledger.phases.now()))
        self._began_s = None
        if step == self._steps[1]:
            await self.close()

    async def close(self) -> None:
        """Writes what was profiled, if anything was: the last step has ended, or the run."""
        spans, self._ledger.recorded = self._ledger.recorded, None
        if spans is None:
            return
        self._report(await self._workers.stop_traces())
        if not self._marks:
            return
        timeline = chrome_trace(spans, self._marks)
        try:
            self._folder.mkdir(exist_ok=True)
            write_atomically(self._folder / TIMELINE, json.dumps(timeline).encode())
        except OSError as error:  # a profile must not end the run
            self._log.say(f"no timeline of the profile: {error}")
            return
        done = " to ".join(dict.fromkeys((self._marks[0].phase, self._marks[-1].phase)))
        self._log.event("profiled", f"profile of {done}: {self._folder}", folder=str(self._folder))

    def _report(self, errors: Mapping[str, str]) -> None:
        for process, error in errors.items():
            self._log.say(f"no profile of {process}: {error}")


def chrome_trace(spans: Mapping[str, Sequence[Span]], steps: Sequence[Span]) -> dict[str, Any]:
    """A timeline in Chrome's trace format, with times in microseconds since the first step.

    Args:
        spans: phases by process; what lies outside of all steps is cut off.
        steps: the steps, in their order.
    """
    start_s, end_s = steps[0].start_s, steps[-1].end_s
    events: list[dict[str, Any]] = []
    for number, (process, own) in enumerate({_STEPS: steps, **spans}.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": process}})
        for span in sorted(own, key=lambda one: one.start_s):
            left, right = max(span.start_s, start_s), min(span.end_s, end_s)
            if left >= right:
                continue
            events.append(
                {
                    "ph": "X",
                    "name": span.phase,
                    "pid": number,
                    "tid": 0,
                    "ts": (left - start_s) * _US,
                    "dur": (right - left) * _US,
                    "args": {"spare": span.spare},
                }
            )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"start_unix_s": start_s, "end_unix_s": end_s},
    }
