"""Restarts worker processes that die or hang, and repeats their calls.

    Workers -> RestartingWorker -> sampler | scorer        a call of a dead process is repeated
    Heartbeats -> kill a process that hangs                so that its calls raise `WorkerDied`

Rollouts are functions of their names, so that repeated calls return the same ones. The learner has
a state: its death ends the coordinator, and `launch.session` resumes from the last checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from configs.faults import Faults
from pipeline.contracts.adapters import Published
from pipeline.contracts.phases import Heartbeat, PhaseClock
from pipeline.contracts.restarts import RestartBudget
from pipeline.contracts.workers import Restartable, WorkerDied

RESTARTED = "restarted"
"""Journal event: a process died and was restarted."""
HEARTBEAT_S = 2.0
"""Seconds between two heartbeats."""
_SLOW_PHASES = frozenset({"loading", "compile"})
"""Phases in which a process may not answer for long, as before its first heartbeat: libraries that
load block all of its threads."""
_SLOW = 10
"""How many times longer."""
_ENDLESS_PHASES = _SLOW_PHASES | {"checkpoint", "export"}
"""Phases whose length is not limited."""
_DIRECT = frozenset({"finished"})
"""Methods that a dead process need not answer."""


class TrainingStopped(Exception):  # noqa: N818  # a problem of the run, named in the message
    """Training makes no progress; the user has to act."""


@dataclass
class Restarts:
    """The restarts of a run's processes.

    Attributes:
        faults: how many are allowed.
        phases: of the driver.
        log: takes an event for the journal, its text for the console, and its facts.
        total: restarts in this process of the run.
        done: training steps done, the most so far.
    """

    faults: Faults
    phases: PhaseClock
    log: Callable[..., None]
    total: int = 0
    done: int = 0
    _budgets: dict[str, RestartBudget] = field(default_factory=dict)

    async def restart(self, death: WorkerDied, restart: Callable[[], Awaitable[None]]) -> None:
        """Restarts a process after a pause.

        Args:
            death: what happened to it.
            restart: starts it.

        Raises:
            TrainingStopped: if it has died too often.
            WorkerDied: if it dies again.
        """
        with self.phases.during("restart"):
            await asyncio.sleep(self.pause_s(death))
            await restart()

    def pause_s(self, death: WorkerDied, *, then: str = "it is restarted") -> float:
        """Records a death; returns the seconds to wait before the restart.

        Args:
            death: what happened to a process.
            then: what is done.

        Raises:
            TrainingStopped: if the process has died too often.
        """
        budget = self._budgets.setdefault(death.worker, RestartBudget(self.faults.restarts))
        pause_s = budget.next_pause_s()
        if pause_s is None:
            again = f" again, after {budget.used} restarts without a new training step"
            raise TrainingStopped(
                f"{death}{again if budget.used else ''}; faults.restarts = "
                f"{self.faults.restarts} allows no further restart"
            )
        self.total += 1
        self.log(RESTARTED, f"{death}; {then}", worker=death.worker, why=death.why, pause_s=pause_s)
        return pause_s

    def step_done(self, step: int) -> None:
        """Notes a finished step, counted from 1.

        After one that is not repeated every process may be restarted as often again.
        """
        if step > self.done:
            self.done = step
            for budget in self._budgets.values():
                budget.renew()


class RestartingWorker:
    """The methods of a worker; a call is repeated if its process dies.

    A call that is repeated has the same names, so that nothing is lost or counted twice; a repeated
    `generate` runs through the same shapes and returns the same rollouts.

    Args:
        target: the worker.
        restarts: of the run; None: a death raises `WorkerDied`.
        renew: after a restart, brings the new process into the state of the old one.

    Attributes:
        target: the worker.
        loaded: the adapter that `load` has loaded last.
    """

    def __init__(
        self,
        target: Any,
        *,
        restarts: Restarts | None,
        renew: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.target = target
        self.loaded: Published | None = None
        self._restarts = restarts
        self._renew = renew
        self._lock = asyncio.Lock()
        self._number = 0
        self._is_fresh = False
        self._aborted = asyncio.Event()

    async def abort(self) -> None:
        """Ends generation, and a restart that is under way: its call raises `WorkerDied`."""
        self._aborted.set()
        await self.target.abort()

    async def resume(self) -> None:
        """Allows generation and restarts again."""
        self._aborted.clear()
        await self.target.resume()

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        """An async method of the worker.

        Raises:
            TrainingStopped: by the call, if the process dies too often.
            WorkerDied: by the call, if the process is not restarted.
        """
        if method.startswith("_"):
            raise AttributeError(method)
        if method in _DIRECT:
            return cast("Callable[..., Awaitable[Any]]", getattr(self.target, method))

        async def call(*args: Any, **kwargs: Any) -> Any:
            while True:
                number = self._number
                try:
                    if self._is_fresh:
                        await self._unless_aborted(self._renewed())
                    result = await getattr(self.target, method)(*args, **kwargs)
                except WorkerDied as death:
                    if self._restarts is None:
                        raise
                    await self._unless_aborted(self._restart(self._restarts, number, death))
                else:
                    if method == "load":
                        (self.loaded,) = args
                    return result

        return call

    async def _renewed(self) -> None:
        """Brings a new process into the state of the old one, unless that is done."""
        async with self._lock:
            if self._is_fresh and self._renew is not None:
                await self._renew()
            self._is_fresh = False

    async def _unless_aborted(self, work: Coroutine[Any, Any, None]) -> None:
        """Waits for a part of a restart; the next call makes up for one that is aborted.

        Raises:
            WorkerDied: if it is aborted.
        """
        task, aborted = asyncio.create_task(work), asyncio.create_task(self._aborted.wait())
        try:
            await asyncio.wait({task, aborted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            aborted.cancel()
            is_done = task.done() or not task.cancel()
        if not is_done:
            raise WorkerDied("a process", "its restart was abandoned")
        task.result()

    async def _restart(self, restarts: Restarts, number: int, death: WorkerDied) -> None:
        """Restarts the process, unless another call has done that since start `number`.

        Raises:
            TrainingStopped: if it has died too often.
            WorkerDied: if it cannot be restarted while the others go on.
        """
        async with self._lock:
            while number == self._number:
                self._is_fresh = True
                try:
                    await restarts.restart(death, self.target.restart)
                except WorkerDied as again:
                    if not again.alone:
                        raise
                    death = again
                else:
                    self._number += 1


@dataclass
class _Life:
    """Signs of life of a process; `last` is None before the first."""

    last: Heartbeat | None = None
    silent_s: float = 0.0
    asked: asyncio.Future[Heartbeat] | None = None

    def forget(self) -> None:
        """Does not wait for the heartbeat that is asked for."""
        if self.asked is not None and not self.asked.cancel():
            self.asked.exception()  # retrieved, so that nobody reports it


class Heartbeats:
    """Ends processes that hang, so that their calls raise `WorkerDied`.

    A process that is stopped or swapped out does not answer; one that waits for a lock answers, and
    its phase makes no progress. The limits depend on the phase of its last heartbeat.

    Args:
        processes: by name.
        faults: the limits.
    """

    def __init__(self, processes: Mapping[str, Restartable], faults: Faults) -> None:
        self._processes = processes
        self._faults = faults
        self._lives = {name: _Life() for name in processes}

    async def watch(self) -> None:
        """Watches until it is cancelled."""
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now_s = loop.time()
            # Not the time in which this process itself was stopped.
            self.check(min(now_s - last_s, 2 * HEARTBEAT_S))
            last_s = now_s

    def check(self, passed_s: float) -> None:
        """Takes the answers, ends processes that hang, and asks the others again.

        Args:
            passed_s: seconds since the last check.
        """
        for name, process in self._processes.items():
            life = self._lives[name]
            if life.asked is not None and life.asked.done():
                error, life.silent_s = life.asked.exception(), 0.0
                life.last = None if error is not None else life.asked.result()
                life.asked = None
            if life.asked is None:
                life.asked = asyncio.ensure_future(process.heartbeat())
            else:
                life.silent_s += passed_s
            why = self._hangs(life)
            if why is not None:
                process.kill(why)
                life.forget()
                self._lives[name] = _Life()

    def close(self) -> None:
        """Ends the watch."""
        for life in self._lives.values():
            life.forget()

    def _hangs(self, life: _Life) -> str | None:
        last, faults = life.last, self._faults
        phase = None if last is None else last.phase
        limit_s = faults.silent_s * (_SLOW if last is None or phase in _SLOW_PHASES else 1)
        if life.silent_s > limit_s:
            doing = f", the last in the phase {phase}" if phase else ""
            return f"it gave no heartbeat for {limit_s:.0f} s{doing} (faults.silent_s)"
        if last is not None and phase not in _ENDLESS_PHASES and last.unchanged_s > faults.stuck_s:
            return f"its phase {phase} made no progress for {faults.stuck_s:.0f} s (faults.stuck_s)"
        return None
