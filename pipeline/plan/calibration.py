"""Measures sizes at the start of a run and puts the fastest ones in force.

    CalibrationStart -> compile the planned sizes -> measure them, then neighbours of the fastest
                     -> plan.json, journal "calibrated", speeds cached for later runs

Measures the parts of a step: segments, prefills and cache fills of a sampler, micro-batches of the
learner. The first sampler measures for all. Applying an update, rewards and syncs do not depend on
sizes. A resumed run measures nothing: its sizes are in `plan.json`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from configs.schema import Config
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import Speeds, Table
from pipeline.contracts.workers import MeasurableLearner, MeasurableSampler
from pipeline.plan.forecast import calibration_share_s
from pipeline.plan.search.fitting import PlanCase, first_sizes, is_of_hardware, planned_sizes
from pipeline.plan.size_choice import SizeName, StepTimes, fastest_size, neighbours
from pipeline.plan.size_controller import SizeController, Worker
from pipeline.plan.speed_cache import load_speeds, save_speeds

STEADY = 1.5
"""Cached speeds are used if micro-batches take between 1 / STEADY and STEADY times as long."""
_SLACK = 1.25
"""The next size may take this many times as long as the last one."""


@dataclass(frozen=True)
class CalibrationStart:
    """The sizes that a run starts with, and what it measures.

    Attributes:
        sizes: to prepare the processes for.
        case: the run to measure for; None: nothing is measured.
        cached: speeds of an earlier run; `sizes` are the fastest of them.
    """

    sizes: Sizes
    case: PlanCase | None = None
    cached: Speeds | None = None

    @staticmethod
    def of(config: Config, recorded: Mapping[str, Any] | None) -> CalibrationStart:
        """The fastest cached sizes, else the planned; without measuring the recorded or configured.

        Raises:
            FileNotFoundError: if the model's folder is not there.
            ValueError: if no sizes fit.
        """
        plan = config.plan
        # The memory of a GPU is unknown before it is opened: the configured sizes are tried.
        measures = not plan.fixed and plan.platform != "gpu" and calibration_share_s(config) > 0
        if (recorded is not None and is_of_hardware(recorded, config)) or not measures:
            return CalibrationStart(first_sizes(config, recorded))
        case = PlanCase.of(config)
        cached = load_speeds(case)
        best = None if cached is None else StepTimes.of(case, cached, case.lengths).best
        if best is None:
            return CalibrationStart(planned_sizes(case), case)
        return CalibrationStart(best, case, cached)


async def calibrate(
    controller: SizeController,
    start: CalibrationStart,
    *,
    sampler: tuple[Worker, MeasurableSampler],
    learner: tuple[Worker, MeasurableLearner],
    now: Callable[[], float] = time.monotonic,
) -> StepTimes | None:
    """Measures sizes and puts the fastest in force; processes are prepared before their next call.

    Measures the sizes in force, smaller ones if they do not fit, then neighbours of the fastest
    size, while there are any and the remaining time suffices for as long as the last one took.
    Neighbours that do not fit are ruled out. Sizes with cached speeds are not measured again,
    except the micro-batches in force, which tell whether this device is as fast.

    Args:
        controller: puts sizes in force.
        start: what to measure.
        sampler: the first sampler and its process.
        learner: the learner and its process.
        now: reads the clock, in seconds.

    Returns:
        The seconds of a step by measured size; None: nothing is measured in this run.

    Raises:
        NothingSmaller: if even the smallest sizes do not fit.
    """
    case = start.case
    if case is None:
        return None
    began, share_s = now(), calibration_share_s(case.config)
    climb = _Climb(controller, case, now)
    speeds = await controller.call(learner[0], learner[1].learner_speed)
    cached = None if start.cached is None else _rescaled(start.cached, speeds)
    if cached is not None:
        speeds |= cached
    elif start.cached is not None:
        controller.say(
            "measuring again: the cached speeds are not those of this device and these sizes"
        )
    if not climb.times(speeds.limited(controller.room)).slots:
        speeds, cached = speeds | await controller.call(sampler[0], sampler[1].sampler_speed), None
    before = speeds = speeds.limited(controller.room)
    speeds = await climb.run(
        "slots", speeds, sampler[0], sampler[1].sampler_speed, until=began + share_s / 2
    )
    speeds = await climb.run(
        "micro_batch_tokens", speeds, learner[0], learner[1].learner_speed, until=began + share_s
    )
    is_cached = cached is not None and speeds == before
    save_speeds(case, speeds)
    times, seconds, sizes = climb.times(speeds), now() - began, controller.in_force
    facts = {
        "seconds": round(seconds, 3),
        "share_s": round(share_s, 3),
        "kept": is_cached,
        "sizes": sizes.to_json(),
        **times.to_json(),
        "lengths": vars(case.lengths),
        "speeds": speeds.to_json(),
    }
    how = "measured in an earlier run" if is_cached else f"measured in {seconds:.0f} s"
    text = (
        f"sizes: {sizes.slots} slots and micro-batches of {sizes.micro_batch_tokens} tokens, "
        f"{how}: about {times.tokens_per_s:,.0f} trained tokens a second"
    )
    controller.put_in_force(sizes, "calibrated", text, facts)
    return times


def _rescaled(cached: Speeds, measured: Speeds) -> Speeds | None:
    """Cached speeds in proportion to those of this device; None: of another device, or unknown."""
    ratios = [
        seconds / cached.micro_batch_s[rows]
        for rows, seconds in measured.micro_batch_s.items()
        if rows in cached.micro_batch_s
    ]
    if measured.device != cached.device or not ratios:
        return None
    if not all(1 / STEADY <= ratio <= STEADY for ratio in ratios):
        return None
    return cached.scaled(median(ratios))


@dataclass
class _Climb:
    """Goes from a size to a faster neighbour, until there is none.

    Attributes:
        controller: puts sizes in force.
        case: the run to measure for.
        now: reads the clock, in seconds.
        last_s: seconds of compiling and measuring the last neighbour.
    """

    controller: SizeController
    case: PlanCase
    now: Callable[[], float]
    last_s: float = 0.0

    def times(self, speeds: Speeds) -> StepTimes:
        """Seconds of a step with the assumed lengths."""
        return StepTimes.of(self.case, speeds, self.case.lengths)

    async def run(
        self,
        name: SizeName,
        speeds: Speeds,
        worker: Worker,
        measure: Callable[[], Awaitable[Speeds]],
        *,
        until: float,
    ) -> Speeds:
        """Adds the speeds of neighbours of the fastest size, and puts that size in force.

        Args:
            name: the size to change.
            speeds: measured for at least one size.
            worker: the process that is measured.
            measure: measures it with the sizes that it is prepared for.
            until: time at which the last measurement should end.
        """
        tried = set[int]()
        while True:
            known: Table = getattr(self.times(speeds), name)
            fastest = fastest_size(known)
            best = replace(self.controller.in_force, **{name: fastest})
            self.controller.in_force = best
            # Of slots that were measured as a bucket of more slots, not all buckets are known.
            measured = speeds.fill_s if name == "slots" else known
            near = [
                sizes
                for sizes in neighbours(self.case, best, name)
                if getattr(sizes, name) not in {*measured, *tried}
                and sizes.at_most(speeds.room) == sizes
            ]
            if not near or self.now() + _SLACK * self.last_s > until:
                return speeds
            sizes, began = near[0], self.now()
            size: int = getattr(sizes, name)
            tried.add(size)
            try:
                await self.controller.try_sizes(worker, sizes)
                speeds |= await measure()
            except OutOfMemory as error:
                self.controller.say(f"measuring plan.{name} = {size}: {error}")
                # A colocated process may have run out while going back from the other size.
                if (error.phase == "generate") == (name == "slots"):
                    speeds = speeds.limited({name: max(fastest, size - 1)})
            self.last_s = self.now() - began
