"""Profiles of training steps: learner and samplers each write a JAX profiler trace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pipeline.protocols import Worker
from pipeline.run_context import RunContext

FOLDER = "profile"


class Profiler:
    """Profiles the training steps that `profile.steps` names; their results do not change."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._steps = run, run.config.profile.range
        self._folder = run.folder.path / FOLDER
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
            await self._each(lambda one, name: one.start_trace(str(self._folder / name)))

    async def end(self, step: int) -> None:
        """Writes the profile, if the step that has ended was its last one."""
        if self._steps is not None and step == self._steps[1]:
            await self.close()

    async def close(self) -> None:
        """Writes what was profiled, if anything was."""
        if self._is_tracing:
            self._is_tracing = False
            await self._each(lambda one, _: one.stop_trace())
            self._run.records.say(f"profile: {self._folder}")

    async def _each(self, call: Callable[[Worker, str], Awaitable[None]]) -> None:
        """Calls each process; shows errors, which must not end the run."""
        processes = self._run.workers.reporting
        calls = (call(one, name.replace(" ", "_")) for name, one in processes.items())
        found = await asyncio.gather(*calls, return_exceptions=True)
        for name, error in zip(processes, found, strict=True):
            if error is not None:
                self._run.records.say(f"no profile of {name}: {error}")
