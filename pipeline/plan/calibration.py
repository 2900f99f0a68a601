"""Measures sizes at the start of a run and puts the best in force.

    CalibrationStart -> the largest sizes are compiled -> [sampler, learner] measured, size by size
                 -> Choice -> plan.json, journal "calibrated"; speeds are kept for the next run

Measured are a sampler's segments, prefills and fills, and a learner's micro-batches: what a step
consists of, not a step. Only the first of several samplers measures; they are alike. What applies
an update, rewards and syncs does not depend on sizes. A run that goes on measures nothing: its
sizes are in its plan.json.
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
from pipeline.contracts.workers import Draws, Learns
from pipeline.plan.calibrating import share_s
from pipeline.plan.choice import (
    Calibrated,
    Choice,
    best,
    choose_sizes,
    drawing_seconds,
    estimated,
    learning_seconds,
    still_improves,
    without_room,
)
from pipeline.plan.kept import keep_speeds, kept_speeds, speeds_key
from pipeline.plan.ladder import Ladder
from pipeline.plan.search.search import Case
from pipeline.plan.size_controller import SizeController, Worker
from pipeline.plan.start import case_of, first_sizes

STEADY = 1.5
"""What was kept counts while micro-batches take no more than so many times what they took, and no
less than that part of it."""
_SLACK = 1.25
"""The next size may take so many times what the last one did."""


@dataclass(frozen=True)
class CalibrationStart:
    """With what a process begins.

    Attributes:
        sizes: that it prepares itself for.
        case: what is measured for; None: nothing is measured.
        ladder: what is measured; likewise.
        key: under which speeds are kept.
        kept: that were found there; the sizes are the best of them.
        more: whether sizes are to be measured that are not among them.
    """

    sizes: Sizes
    case: Case | None = None
    ladder: Ladder | None = None
    key: Mapping[str, Any] = field(default_factory=dict)
    kept: Speeds | None = None
    more: bool = False

    @staticmethod
    def of(config: Config, recorded: Mapping[str, Any] | None) -> CalibrationStart:
        """What is kept, else the largest sizes; without measuring, what is given or planned.

        Raises:
            FileNotFoundError: if the model's folder is not there.
            ValueError: if no sizes fit.
        """
        sizes = first_sizes(config, recorded)
        if config.plan.fixed or recorded is not None or not share_s(config):
            return CalibrationStart(sizes)
        if config.plan.platform == "gpu":
            # Nothing is known of it before it is opened: what is given is tried.
            return CalibrationStart(sizes)
        case = case_of(config)
        ladder, key = Ladder.of(case, sizes), speeds_key(config, case.shape)
        kept = kept_speeds(key)
        choice = None if kept is None else choose_sizes(config, ladder, kept, case.lengths)
        if kept is None or choice is None:
            return CalibrationStart(ladder.top(config), case, ladder, key, more=True)
        return CalibrationStart(choice.sizes, case, ladder, key, kept, _more(case, ladder, kept))


async def calibrate(
    controller: SizeController,
    beginning: CalibrationStart,
    *,
    sampler: tuple[Worker, Draws],
    learner: tuple[Worker, Learns],
    now: Callable[[], float] = time.monotonic,
) -> Calibrated | None:
    """Measures, and puts the best sizes in force; who has other ones is prepared before it works.

    The largest sizes that have room are measured in any case; a smaller one only while what is left
    of the share is enough for what the last one took. What an earlier run has measured is not
    measured again, but for the micro-batches that tell whether this device is as fast. A size that
    runs out of memory is noted and the next smaller one tried.

    Returns:
        What was found; None: nothing is measured in this run, or nothing had room.
    """
    case, ladder = beginning.case, beginning.ladder
    if case is None or ladder is None:
        return None
    began, speeds = now(), Speeds()
    bench = _Bench(controller, case, ladder, sampler, learner, now)
    if beginning.kept is not None:
        factor = await bench.as_long(beginning.kept)
        if factor is None:
            controller.say("measuring anew: this device is not as fast as what was kept says")
        else:
            speeds = beginning.kept.scaled(factor) if beginning.more else beginning.kept
    most_s = share_s(case.config)
    known, until = bool(speeds.device), began + most_s
    speeds = before = without_room(
        speeds,
        ladder,
        asked=beginning.sizes,
        got=controller.in_force,
        row=case.config.row_tokens,
    )
    if beginning.more or not known or controller.in_force != beginning.sizes:
        speeds = await bench.slots(speeds, until=(began + until) / 2)
        speeds = await bench.rows(speeds, until=until)
    kept = known and speeds == before
    keep_speeds(beginning.key, speeds)
    choice = choose_sizes(case.config, ladder, speeds, case.lengths)
    if choice is None:
        return None
    seconds = now() - began
    facts = {
        "seconds": round(seconds, 3),
        "share_s": round(most_s, 3),
        "kept": kept,
        **choice.to_json(),
        "estimated": estimated(case, ladder, choice),
        "lengths": vars(case.lengths),
        "speeds": speeds.to_json(),
    }
    text = _sentence(choice, seconds, kept=kept)
    controller.put_in_force(choice.sizes, "calibrated", text, facts)
    return Calibrated(case, ladder, speeds, choice)


def _more(case: Case, ladder: Ladder, speeds: Speeds) -> bool:
    """Whether a run that had measured this would, with time, measure more."""
    slots = drawing_seconds(case.config, ladder, speeds, case.lengths)
    rows = learning_seconds(case.config, ladder, speeds, case.lengths)
    return _improves(slots, ladder.slots, speeds.full_slots) or _improves(
        rows, ladder.rows, speeds.full_rows
    )


def _improves(known: Mapping[int, float], sizes: Sequence[int], full: Sequence[int]) -> bool:
    """Whether another size is to be measured: there is one, and it may be better."""
    has_room = [size for size in sizes if size not in full]
    return any(size not in known for size in has_room) and still_improves(known, has_room)


def _sentence(choice: Choice, seconds: float, *, kept: bool) -> str:
    sizes = choice.sizes
    how = "measured in an earlier run" if kept else f"measured in {seconds:.0f} s"
    return (
        f"sizes: {sizes.slots} slots and micro-batches of {sizes.micro_batch_tokens} "
        f"tokens, {how}: about {choice.tokens_per_s:,.0f} trained tokens a second"
    )


@dataclass
class _Bench:
    """Sizes that are tried one after the other."""

    controller: SizeController
    case: Case
    ladder: Ladder
    sampler: tuple[Worker, Draws]
    learner: tuple[Worker, Learns]
    now: Callable[[], float]

    async def as_long(self, kept: Speeds) -> float | None:
        """How many times what was kept this device takes; None: it is another one.

        Measures the micro-batches in force.
        """
        try:
            found = await self.learner[1].learning_speed()
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
        """Adds what a sampler takes with each number of slots, and puts the best in force."""
        worker, draws = self.sampler

        async def one(slots: int, speeds: Speeds) -> Speeds:
            await self.controller.try_sizes(worker, replace(self.controller.in_force, slots=slots))
            return speeds.with_sampler(await draws.drawing_speed())

        def known(speeds: Speeds) -> Mapping[int, float]:
            config, lengths = self.case.config, self.case.lengths
            return drawing_seconds(config, self.ladder, speeds, lengths)

        rungs = _Rungs("slots", self.ladder.slots, one, known)
        speeds = await self._down(rungs, speeds, until=until)
        if known(speeds):
            slots = best(known(speeds))
            self.controller.choose(replace(self.controller.in_force, slots=slots))
        return speeds

    async def rows(self, speeds: Speeds, *, until: float) -> Speeds:
        """Adds what a learner takes with micro-batches of each size."""
        (worker, learns), row = self.learner, self.case.config.row_tokens

        async def one(rows: int, speeds: Speeds) -> Speeds:
            await self.controller.try_sizes(
                worker, replace(self.controller.in_force, micro_batch_tokens=rows * row)
            )
            return speeds.with_learner(await learns.learning_speed())

        def known(speeds: Speeds) -> Mapping[int, float]:
            config, lengths = self.case.config, self.case.lengths
            return learning_seconds(config, self.ladder, speeds, lengths)

        rungs = _Rungs("rows", self.ladder.rows, one, known)
        return await self._down(rungs, speeds, until=until)

    async def _down(self, rungs: _Rungs, speeds: Speeds, *, until: float) -> Speeds:
        """Measures one that has room, and more while there is time and smaller may be better."""
        last_s = speeds.last_s
        for size in rungs.sizes:
            known, full = rungs.known(speeds), rungs.full(speeds)
            if size in known or size in full:
                continue
            began = self.now()
            is_late = began + _SLACK * last_s > until
            if known and (is_late or not _improves(known, rungs.sizes, full)):
                break
            try:
                speeds = await rungs.one(size, speeds)
            except OutOfMemory as error:
                self.controller.say(f"measuring {size} {rungs.what}: no room: {error.what}")
                speeds = speeds.without(**{rungs.what: size})
            last_s = self.now() - began
            speeds = replace(speeds, last_s=last_s)
        return speeds


@dataclass(frozen=True)
class _Rungs:
    """One of the two ladders.

    Attributes:
        what: is counted.
        sizes: falling.
        one: measures a size.
        known: seconds of a step by the sizes that were measured.
    """

    what: Literal["slots", "rows"]
    sizes: tuple[int, ...]
    one: Callable[[int, Speeds], Awaitable[Speeds]]
    known: Callable[[Speeds], Mapping[int, float]]

    def full(self, speeds: Speeds) -> tuple[int, ...]:
        """Sizes that have no room."""
        return speeds.full_slots if self.what == "slots" else speeds.full_rows
