"""Profiles of training steps: learner and samplers each write a JAX profiler trace."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.rollout.workers import Workers
from pipeline.run.records import Records

FOLDER = "profile"


class Profiler:
    """Profiles the training steps that `profile.steps` names; their results do not change.

    Args:
        steps: first and last, counted from 1; None: no profile.
        workers: trace their processes.
        records: of the run, in whose folder the profile is.
    """

    def __init__(
        self, steps: tuple[int, int] | None, *, workers: Workers, records: Records
    ) -> None:
        self._steps, self._folder = steps, records.folder.path / FOLDER
        self._workers, self._log = workers, records
        self._is_tracing = False

    async def begin(self, step: int) -> None:
        """Begins the profile, if this is its first step in this process.

        Args:
            step: that begins now, counted from 1.
        """
        if self._steps is None or self._is_tracing:
            return
        if self._steps[0] <= step <= self._steps[1]:
            self._is_tracing = True
            self._report(await self._workers.start_traces(self._folder))

    async def end(self, step: int) -> None:
        """Writes the profile, if the step that has ended was its last one."""
        if self._steps is not None and step == self._steps[1]:
            await self.close()

    async def close(self) -> None:
        """Writes what was profiled, if anything was."""
        if self._is_tracing:
            self._is_tracing = False
            self._report(await self._workers.stop_traces())
            self._log.say(f"profile: {self._folder}")

    def _report(self, errors: Mapping[str, str]) -> None:
        for process, error in errors.items():
            self._log.say(f"no profile of {process}: {error}")
