"""Measures sizes at the start of a run and puts the fastest ones in force.

    CalibrationStart -> compile the largest sizes -> measure sampler and learner, size by size
                     -> SizeChoice -> plan.json, journal "calibrated", speeds cached for later runs

Measures the parts of a step: segments, prefills and cache fills of a sampler, micro-batches of the
learner. The first sampler measures for all. Applying an update, rewards and syncs do not depend on
sizes. A resumed run measures nothing: its sizes are in `plan.json`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from configs.schema import Config
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import Speeds
from pipeline.contracts.workers import MeasurableLearner, MeasurableSampler
from pipeline.plan.forecast import calibration_share_s
from pipeline.plan.search.fitting import PlanCase, first_sizes
from pipeline.plan.size_choice import (
    Calibrated,
    SizeChoice,
    SizeLadder,
    choose_sizes,
    estimated_seconds,
    fastest_size,
    learning_seconds,
    mark_full,
    sampling_seconds,
    still_improves,
)
from pipeline.plan.size_controller import SizeController, Worker
from pipeline.plan.speed_cache import load_speeds, save_speeds, speeds_key

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
        ladder: sizes to measure; None: nothing is measured.
        key: of the cached speeds.
        cached: speeds of an earlier run; `sizes` are the fastest of them.
        more: whether there are sizes to measure beyond the cached ones.
    """

    sizes: Sizes
    case: PlanCase | None = None
    ladder: SizeLadder | None = None
    key: Mapping[str, Any] = field(default_factory=dict)
    cached: Speeds | None = None
    more: bool = False

    @staticmethod
    def of(config: Config, recorded: Mapping[str, Any] | None) -> CalibrationStart:
        """The fastest cached sizes, else the largest; without measuring the configured or planned.

        Raises:
            FileNotFoundError: if the model's folder is not there.
            ValueError: if no sizes fit.
        """
        sizes = first_sizes(config, recorded)
        if config.plan.fixed or recorded is not None or not calibration_share_s(config):
            return CalibrationStart(sizes)
        if config.plan.platform == "gpu":
            # The memory of a GPU is unknown before it is opened: the configured sizes are tried.
            return CalibrationStart(sizes)
        case = PlanCase.of(config)
        ladder, key = SizeLadder.of(case, sizes), speeds_key(config, case.shape)
        kept = load_speeds(key)
        choice = None if kept is None else choose_sizes(config, ladder, kept, case.lengths)
        if kept is None or choice is None:
            return CalibrationStart(ladder.top(config), case, ladder, key, more=True)
        return CalibrationStart(choice.sizes, case, ladder, key, kept, _more(case, ladder, kept))


async def calibrate(
    controller: SizeController,
    beginning: CalibrationStart,
    *,
    sampler: tuple[Worker, MeasurableSampler],
    learner: tuple[Worker, MeasurableLearner],
    now: Callable[[], float] = time.monotonic,
) -> Calibrated | None:
    """Measures sizes and puts the fastest in force; processes are prepared before their next call.

    Always measures the largest sizes that fit, and a smaller one only while the remaining time
    suffices for as long as the last one took. Sizes with cached speeds are not measured again,
    except the micro-batches in force, which tell whether this device is as fast. After a size that
    does not fit comes the next smaller one.

    Args:
        controller: puts sizes in force.
        beginning: what to measure.
        sampler: the first sampler and its process.
        learner: the learner and its process.
        now: reads the clock, in seconds.

    Returns:
        The measurements and the choice; None: nothing is measured in this run, or nothing fits.
    """
    case, ladder = beginning.case, beginning.ladder
    if case is None or ladder is None:
        return None
    began, speeds = now(), Speeds()
    bench = _SizeBenchmark(controller, case, ladder, sampler, learner, now)
    if beginning.cached is not None:
        factor = await bench.relative_seconds(beginning.cached)
        if factor is None:
            controller.say("measuring again: this device is not as fast as the cached speeds say")
        else:
            speeds = beginning.cached.scaled(factor) if beginning.more else beginning.cached
    most_s = calibration_share_s(case.config)
    known, until = bool(speeds.device), began + most_s
    speeds = before = mark_full(
        speeds,
        ladder,
        requested=beginning.sizes,
        fitting=controller.in_force,
        row=case.config.row_tokens,
    )
    if beginning.more or not known or controller.in_force != beginning.sizes:
        speeds = await bench.slots(speeds, until=(began + until) / 2)
        speeds = await bench.rows(speeds, until=until)
    kept = known and speeds == before
    save_speeds(beginning.key, speeds)
    choice = choose_sizes(case.config, ladder, speeds, case.lengths)
    if choice is None:
        return None
    seconds = now() - began
    facts = {
        "seconds": round(seconds, 3),
        "share_s": round(most_s, 3),
        "kept": kept,
        **choice.to_json(),
        "estimated": estimated_seconds(case, ladder, choice),
        "lengths": vars(case.lengths),
        "speeds": speeds.to_json(),
    }
    text = _sentence(choice, seconds, kept=kept)
    controller.put_in_force(choice.sizes, "calibrated", text, facts)
    return Calibrated(case, ladder, speeds, choice)


def _more(case: PlanCase, ladder: SizeLadder, speeds: Speeds) -> bool:
    """Whether a run with these measurements would, given time, measure more sizes."""
    slots = sampling_seconds(case.config, ladder, speeds, case.lengths)
    rows = learning_seconds(case.config, ladder, speeds, case.lengths)
    return _improves(slots, ladder.slots, speeds.full_slots) or _improves(
        rows, ladder.rows, speeds.full_rows
    )


def _improves(known: Mapping[int, float], sizes: Sequence[int], full: Sequence[int]) -> bool:
    """Whether there is an unmeasured size that may be faster."""
    fitting = [size for size in sizes if size not in full]
    return any(size not in known for size in fitting) and still_improves(known, fitting)


def _sentence(choice: SizeChoice, seconds: float, *, kept: bool) -> str:
    sizes = choice.sizes
    how = "measured in an earlier run" if kept else f"measured in {seconds:.0f} s"
    return (
        f"sizes: {sizes.slots} slots and micro-batches of {sizes.micro_batch_tokens} "
        f"tokens, {how}: about {choice.tokens_per_s:,.0f} trained tokens a second"
    )


@dataclass
class _SizeBenchmark:
    """Measures one size after the other."""

    controller: SizeController
    case: PlanCase
    ladder: SizeLadder
    sampler: tuple[Worker, MeasurableSampler]
    learner: tuple[Worker, MeasurableLearner]
    now: Callable[[], float]

    async def relative_seconds(self, kept: Speeds) -> float | None:
        """Seconds relative to the cached ones; None: another device, or not comparable.

        Measures the micro-batches in force.
        """
        try:
            found = await self.learner[1].learner_speed()
        except OutOfMemory:
            return None
        ratios = [
            seconds / kept.micro_batch_s[rows]
            for rows, seconds in found.micro_batch_s.items()
            if rows in kept.micro_batch_s
        ]
        steady = all(1 / STEADY <= ratio <= STEADY for ratio in ratios)
        same = found.device == kept.device and bool(ratios) and steady
        return median(ratios) if same else None

    async def slots(self, speeds: Speeds, *, until: float) -> Speeds:
        """Adds the speeds of a sampler by slots, and puts the fastest slots in force."""
        worker, draws = self.sampler

        async def measure(slots: int, speeds: Speeds) -> Speeds:
            await self.controller.try_sizes(worker, replace(self.controller.in_force, slots=slots))
            return speeds.with_sampler(await draws.sampler_speed())

        def step_seconds(speeds: Speeds) -> Mapping[int, float]:
            config, lengths = self.case.config, self.case.lengths
            return sampling_seconds(config, self.ladder, speeds, lengths)

        candidates = _Candidates("slots", self.ladder.slots, measure, step_seconds)
        speeds = await self._down(candidates, speeds, until=until)
        if step_seconds(speeds):
            slots = fastest_size(step_seconds(speeds))
            self.controller.choose(replace(self.controller.in_force, slots=slots))
        return speeds

    async def rows(self, speeds: Speeds, *, until: float) -> Speeds:
        """Adds the speeds of the learner by micro-batch rows."""
        (worker, learns), row = self.learner, self.case.config.row_tokens

        async def measure(rows: int, speeds: Speeds) -> Speeds:
            await self.controller.try_sizes(
                worker, replace(self.controller.in_force, micro_batch_tokens=rows * row)
            )
            return speeds.with_learner(await learns.learner_speed())

        def step_seconds(speeds: Speeds) -> Mapping[int, float]:
            config, lengths = self.case.config, self.case.lengths
            return learning_seconds(config, self.ladder, speeds, lengths)

        candidates = _Candidates("rows", self.ladder.rows, measure, step_seconds)
        return await self._down(candidates, speeds, until=until)

    async def _down(self, candidates: _Candidates, speeds: Speeds, *, until: float) -> Speeds:
        """Measures the largest size that fits, and smaller ones while they may be faster."""
        last_s = speeds.last_s
        for size in candidates.sizes:
            known, full = candidates.step_seconds(speeds), candidates.full(speeds)
            if size in known or size in full:
                continue
            began = self.now()
            is_late = began + _SLACK * last_s > until
            if known and (is_late or not _improves(known, candidates.sizes, full)):
                break
            try:
                speeds = await candidates.measure(size, speeds)
            except OutOfMemory as error:
                self.controller.say(
                    f"measuring {size} {candidates.what}: out of memory: {error.what}"
                )
                speeds = speeds.with_full(**{candidates.what: size})
            last_s = self.now() - began
            speeds = replace(speeds, last_s=last_s)
        return speeds


@dataclass(frozen=True)
class _Candidates:
    """Candidates for one of the two sizes.

    Attributes:
        what: the size.
        sizes: descending.
        measure: measures a size.
        step_seconds: seconds of a step by measured size.
    """

    what: Literal["slots", "rows"]
    sizes: tuple[int, ...]
    measure: Callable[[int, Speeds], Awaitable[Speeds]]
    step_seconds: Callable[[Speeds], Mapping[int, float]]

    def full(self, speeds: Speeds) -> tuple[int, ...]:
        """Sizes that do not fit."""
        return speeds.full_slots if self.what == "slots" else speeds.full_rows
