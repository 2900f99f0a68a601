"""Where a step's rollouts come from: drawn when they are wanted, or while the last step is learned.

    rollout.ahead = "off"     draw k -> update k -> sync k+1 -> draw k+1 -> update k+1 -> ...

    rollout.ahead = "one"     sync k -.-> update k: version k+1 -----.-> sync k+1 -.-> ...
                                      '-> draw k+1 under version k --'             '-> ...

    samplers   produce       rollouts of step k+1 under version k, rewards included
               wait for      the rollouts of step k to be there, and version k
               unblocked by  the beginning of step k
    learner    produces      version k+1
               waits for     the rollouts of step k, which version k-1 drew
               unblocked by  the beginning of step k
    sync       waits for     both: nothing is under way between two steps

So every step's rollouts are exactly one version behind, but for the first one's, which nothing can
be drawn ahead of. What was drawn ahead is in no checkpoint: a resumed run has the version before,
draws it again and is the same run. A signal abandons the drawing and lets the update finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pipeline.contracts.clock import Stopwatch
from pipeline.rollout.drawing import Drawer
from pipeline.rollout.rollout_step import RolloutStep, Start
from pipeline.rollout.team import Interrupted, OutOfTime, Team


class Supply:
    """Rollouts for one step after the other.

    Args:
        drawer: draws them.
        team: brings adapters to the samplers.
        ahead: whether a step's are drawn while the last one is learned.
        first: the first step that draws.
        will_be: whether a step will be done; what will not is not drawn ahead.
    """

    def __init__(
        self,
        drawer: Drawer,
        team: Team,
        *,
        ahead: bool,
        first: int,
        will_be: Callable[[int], bool],
    ) -> None:
        self._drawer = drawer
        self._team = team
        self._ahead = ahead
        self._first = first
        self._will_be = will_be
        self._drawing: asyncio.Task[RolloutStep] | None = None

    async def take(self, start: Start, watch: Stopwatch) -> RolloutStep:
        """The rollouts of a step, and the newest version in force.

        Args:
            start: what they are drawn by, if they are not drawn yet.
            watch: gets laps "sample" and "reward" if they are drawn now.

        Raises:
            Interrupted: if `stop` was set while they were drawn.
            OutOfTime: if that took too long.
        """
        if self._drawing is not None:
            drawn, self._drawing = self._drawing.result(), None
            assert drawn.start.step == start.step
            return drawn
        if not self._ahead or start.step == self._first:
            return await self._drawer.draw(start, watch)
        await self._team.publish("previous")
        try:
            drawn = await self._drawer.draw(start, watch)
        except (Interrupted, OutOfTime):
            await self._team.publish()  # the newest is what the run ends with
            raise
        await self._team.publish()
        return drawn

    @asynccontextmanager
    async def beside(self, start: Start) -> AsyncIterator[None]:
        """Draws ahead while the body runs, and is left when both have ended.

        A drawing that a signal or the deadline has ended is no error here: `take` tells.

        Args:
            start: of the step to draw.
        """
        if not (self._ahead and self._will_be(start.step)):
            yield
            return
        drawing = asyncio.create_task(self._drawer.draw(start, Stopwatch(self._drawer.now)))
        try:
            yield
        except BaseException:
            drawing.cancel()
            await asyncio.wait({drawing})
            raise
        await asyncio.wait({drawing})
        error = drawing.exception()
        if error is not None and not isinstance(error, Interrupted | OutOfTime):
            raise error
        self._drawing = drawing

    @property
    def left(self) -> RolloutStep | None:
        """What was drawn ahead and not taken."""
        if self._drawing is None or self._drawing.exception() is not None:
            return None
        return self._drawing.result()
