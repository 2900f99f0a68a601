"""The sizes of a run, fixed before its first step: slots of a sampler, tokens of a micro-batch.

    plan.json, or plan -> compile -> too large: the next smaller
                       -> not given: time planned, half and double -> plan.json

A given size is used as it is, or refused. A resume on the same hardware has the sizes in its
`plan.json`, and measures nothing. Where memory runs out during the run in spite of all, the process
ends, and the next one starts with smaller sizes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from configs.schema import Config
from pipeline.compute.builds import Built, Ready
from pipeline.plan.cost_model.programs import built_programs, compile_s
from pipeline.plan.cost_model.workload import packed_positions, training_work
from pipeline.plan.search.fitting import (
    PlanCase,
    SizedPlan,
    estimate_plan,
    first_sizes,
    hardware_of,
    recorded_sizes,
)
from pipeline.plan.search.size_options import max_useful_rows, max_useful_slots
from pipeline.plan.sizes import Sizes, sized, smaller
from pipeline.protocols import (
    Learner,
    NothingSmaller,
    OutOfMemory,
    Sampler,
    SamplerTimes,
    Worker,
)
from pipeline.run.console import Console
from pipeline.types import ShowProgress

SizeName = Literal["slots", "micro_batch_tokens"]
"""An attribute of `Sizes` and a setting of [plan]."""
REDUCED = "sizes_reduced"
"""Journal event: memory ran out during the run, and the next process starts with smaller sizes."""
_MOST_S, _SHARE = 60.0, 0.02
"""Maximum seconds of measuring, and as a share of a time budget."""
_COMPILING = 0.05
"""Maximum estimated seconds of compiling a run's programs, as a share of the run, for it to compare
sizes."""
_SLACK = 1.25
"""The next size may take this many times as long to measure as the last one."""
_TIE = 0.005
"""Sizes whose seconds differ by at most this share count as equally fast: the smaller one wins."""
_POLL_S = 0.5
"""Seconds between two looks at a process that compiles."""


def plan_file(config: Config, sizes: Sizes) -> dict[str, Any]:
    """The content of `plan.json`."""
    return {"hardware": hardware_of(config), "sizes": sizes.to_json()}


# --- compilation


@dataclass(frozen=True)
class Prepared:
    """What each process has compiled for the sizes, and why larger ones did not fit, by setting.

    Without compiling, which the cache saves another process, it would have taken `once_s` less.
    """

    sizes: Sizes
    ready: Mapping[str, Ready]
    refused: Mapping[str, OutOfMemory]
    once_s: float


async def prepare(
    config: Config,
    sizes: Sizes,
    *,
    processes: Mapping[str, Worker],
    display: Console,
    now: Callable[[], float],
) -> Prepared:
    """Compiles in all processes in parallel, for the next smaller sizes until all fit.

    Raises:
        NothingSmaller: if even the smallest sizes do not fit; a sentence.
    """
    ready, refused = dict.fromkeys(processes, Ready()), dict[str, OutOfMemory]()
    spent_s = dict.fromkeys(processes, 0.0)

    async def attempt(name: str) -> OutOfMemory | None:
        began_s = now()
        try:
            new = await _compile(name, processes[name], sizes, display=display)
        except OutOfMemory as error:
            return error
        finally:
            spent_s[name] += now() - began_s
        before = ready[name]
        ready[name] = Ready(
            before.load_s + new.load_s,
            (*before.built, *new.built),
            before.compiling_s + new.compiling_s,
        )
        return None

    while True:
        found = await asyncio.gather(*(attempt(name) for name in processes))
        errors = [error for error in found if error is not None]
        if not errors:
            # The base is loaded meanwhile.
            without_s = max(
                max(one.load_s, spent_s[name] - one.compiling_s) for name, one in ready.items()
            )
            return Prepared(sizes, ready, refused, max(0.0, max(spent_s.values()) - without_s))
        before = sizes
        for error in errors:
            sizes = sizes.at_most(reduced(config, before, error))
            name = _size_of(error)
            refused.setdefault(name, error)
            display.say(f"plan.{name} = {getattr(before, name)}: {error}")


async def _compile(name: str, process: Worker, sizes: Sizes, *, display: Console) -> Ready:
    """Compiles in one process, and shows each program when it is compiled."""
    shown = len((await process.building()).done)
    task = asyncio.ensure_future(process.prepare(sizes))
    try:
        with display.activity(name, "programs") as show:
            while not task.done():
                await asyncio.wait({task}, timeout=_POLL_S)
                shown = await _show(name, process, shown, display, show)
        return task.result()
    finally:
        task.cancel()


async def _show(
    name: str, process: Worker, shown: int, display: Console, show: ShowProgress
) -> int:
    building = await process.building()
    for number in range(max(shown, building.earlier), len(building.done)):
        display.say(f"{name}: {building.line(number)}")
    if building.total:
        show(len(building.done) - building.earlier, building.total)
    return len(building.done)


def reduced(config: Config, sizes: Sizes, error: OutOfMemory) -> Sizes:
    """The next smaller sizes after an out-of-memory error with `sizes`.

    Raises:
        NothingSmaller: if there are none; a sentence.
    """
    less = smaller(config, sizes, error.phase, share=error.share)
    if less is not None:
        return less
    what = str(error)
    if error.share is not None and error.share <= 0:
        what += (
            "; base, adapter and optimizer, which no size changes, leave no room: "
            "python -m launch.plan shows what would make some"
        )
    elif error.phase != "load":
        name = _size_of(error)
        what += f"; there is nothing smaller than plan.{name} = {getattr(sizes, name)}"
    raise NothingSmaller(error.phase, what, error.share)


def _size_of(error: OutOfMemory) -> SizeName:
    """The size on which the memory of a phase depends."""
    return "slots" if error.phase in {"generate", "sync"} else "micro_batch_tokens"


# --- the sizes of a run


@dataclass(frozen=True)
class Chosen:
    """The sizes of a run, for which all processes are compiled.

    Attributes:
        sizes: the sizes.
        load_s: seconds in which the learner's process has loaded the base.
        once_s: seconds of compiling and measuring that another process of the run does without: it
            finds the programs in the cache, and the sizes in `plan.json`.
        built: programs that were compiled before anything was measured, with the process's name.
        measured: seconds of a step's sampling or learning by size, by setting.
    """

    sizes: Sizes
    load_s: float
    once_s: float
    built: Sequence[Built]
    measured: Mapping[SizeName, Mapping[int, float]]


async def choose_sizes(
    config: Config,
    recorded: Mapping[str, Any] | None,
    *,
    learner: Learner,
    samplers: Sequence[Sampler],
    one_process: bool,
    display: Console,
    now: Callable[[], float] = time.monotonic,
) -> Chosen:
    """Decides on the sizes of the run, and compiles in all processes for them.

    Args:
        config: of the run.
        recorded: content of its `plan.json`.
        learner: the learner.
        samplers: the first one is timed for all.
        one_process: whether the sampler and the learner are the same process.
        display: the console.
        now: reads a clock, in seconds.

    Raises:
        FileNotFoundError: if sizes have to be planned and the model's folder is missing.
        NothingSmaller: if even the smallest sizes do not fit.
        ValueError: if no sizes fit by estimate, or a given one does not fit.
    """
    processes: dict[str, Worker] = {"sampler and learner" if one_process else "learner": learner}
    if not one_process:
        processes |= {f"sampler {number}": sampler for number, sampler in enumerate(samplers)}
    first = first_sizes(config, recorded)
    prepared = await prepare(config, first, processes=processes, display=display, now=now)
    sizes, measured = prepared.sizes, dict[SizeName, Mapping[int, float]]()
    is_new, began_s = recorded_sizes(config, recorded) is None, now()
    if is_new:
        _refuse_given(config, first, prepared)
    if is_new and config.plan.planned_sizes:
        case, names = PlanCase.of(config), list(processes)

        async def sampling(sizes: Sizes) -> float:
            return sampling_s(case, sizes, await samplers[0].sampler_times())

        async def learning(sizes: Sizes) -> float:
            return learning_s(case, sizes, await learner.micro_batch_s())

        timings: dict[SizeName, tuple[str, SecondsOf]] = {
            "slots": (names[-1 if one_process else 1], sampling),
            "micro_batch_tokens": (names[0], learning),
        }
        for name in config.plan.planned_sizes:
            process, seconds_of = timings[name]
            compile_for = partial(_compile, process, processes[process], display=display)
            measured[name] = await _measure(
                case, sizes, name, compile_for=compile_for, seconds_of=seconds_of, now=now
            )
            sizes = replace(sizes, **{name: fastest_size(measured[name])})
            seconds = ", ".join(f"{size}: {s:.3g} s" for size, s in measured[name].items())
            display.say(f"plan.{name} = {getattr(sizes, name)}; seconds of a step: {seconds}")
        last = await prepare(config, sizes, processes=processes, display=display, now=now)
        sizes = last.sizes
    how = "measured" if measured else "given" if is_new else "of plan.json"
    display.say(
        f"sizes ({how}): {sizes.slots} slots, micro-batches of {sizes.micro_batch_tokens} tokens"
    )
    load_s = next(iter(prepared.ready.values())).load_s
    once_s = prepared.once_s + now() - began_s
    return Chosen(sizes, load_s, once_s, _named(prepared.ready), measured)


def _named(ready: Mapping[str, Ready]) -> list[Built]:
    """The programs of all processes; their names begin with the process's."""
    return [
        Built(f"{name}: {one.name}", one.seconds, one.cached)
        for name, own in ready.items()
        for one in own.built
    ]


def _refuse_given(config: Config, first: Sizes, prepared: Prepared) -> None:
    """Refuses given sizes that do not fit.

    Raises:
        ValueError: with a line for each, and the next smaller size that fits.
    """
    lines = [
        f"plan.{name} = {getattr(first, name)} does not fit: {error}; the next smaller that fits "
        f"is {getattr(prepared.sizes, name)}"
        for name, error in prepared.refused.items()
        if name not in config.plan.planned_sizes
    ]
    if lines:
        raise ValueError("\n".join(lines))


# --- measuring

SecondsOf = Callable[[Sizes], Awaitable[float]]
"""The seconds of a step's sampling or learning, in a process that is compiled for the sizes."""


def time_given_s(config: Config) -> float | None:
    """The time budget in seconds, or the time left until its date; None: a budget of steps."""
    budget = config.budget
    if budget.until_s is None:
        return budget.time_s
    return max(0.0, budget.until_s - time.time())


def measuring_limit_s(config: Config) -> float:
    """Maximum seconds of measuring, without compilation."""
    given_s = time_given_s(config)
    return _MOST_S if given_s is None else min(_MOST_S, _SHARE * given_s)


def compares_sizes(case: PlanCase, plan: SizedPlan) -> bool:
    """Whether a run of this plan is long enough to compile other sizes and compare them.

    By estimates: compiling its own programs takes at most `_COMPILING` of the run.
    """
    given_s, steps = time_given_s(plan.config), plan.config.budget.steps or 0
    run_s = steps * plan.step.total.expected if given_s is None else given_s
    programs = built_programs(plan.config, case.shape)
    platform = case.topology.chip.platform
    return compile_s(programs, case.shape, platform=platform) <= _COMPILING * run_s


def candidates(case: PlanCase, sizes: Sizes, name: SizeName) -> list[int]:
    """A size, its half and its double, where it is useful and should fit; multiples of the devices.

    `sizes` fit.
    """
    config, own = case.config, int(getattr(sizes, name))
    unit = config.plan.sampler_shards
    most = unit * max_useful_slots(config)
    if name == "micro_batch_tokens":
        unit = config.row_tokens * config.plan.learner_shards
        most = unit * max_useful_rows(config, case.lengths)
    half, double = max(unit, own // 2 // unit * unit), min(most, 2 * own)
    found = [own] if half == own else [own, half]
    larger = replace(sizes, **{name: double})
    if double > own and estimate_plan(case, "", sized(config, larger)).fits:
        found.append(double)
    return found


async def _measure(
    case: PlanCase,
    sizes: Sizes,
    name: SizeName,
    *,
    compile_for: Callable[[Sizes], Awaitable[Ready]],
    seconds_of: SecondsOf,
    now: Callable[[], float],
) -> dict[int, float]:
    """Seconds of a step by size: of `sizes`, and of its half and double while there is time.

    In a short run `sizes` is the only one; see `compares_sizes`. If it runs out of memory, the next
    smaller one that does not is the only one.

    Raises:
        NothingSmaller: if there is none.
    """
    left, found, spent_s, last_s = candidates(case, sizes, name), dict[int, float](), 0.0, 0.0
    if not compares_sizes(case, estimate_plan(case, "", sized(case.config, sizes))):
        left = left[:1]
    limit_s = measuring_limit_s(case.config) / len(case.config.plan.planned_sizes)
    while left and spent_s + _SLACK * last_s <= limit_s:
        tried = replace(sizes, **{name: left.pop(0)})
        try:
            await compile_for(tried)
            began = now()
            found[getattr(tried, name)] = await seconds_of(tried)
            last_s = now() - began
            spent_s += last_s
        except OutOfMemory as error:
            if not found:
                left = [getattr(reduced(case.config, tried, error), name)]
    return found


def sampling_s(case: PlanCase, sizes: Sizes, times: SamplerTimes) -> float:
    """Seconds of generating a step's rollouts of the expected lengths, by the decode schedule."""
    config = sized(case.config, sizes)
    work, shards = training_work(config, case.lengths), config.plan.sampler_shards
    decode = sum(
        number * times.segment_s[slots * shards] for slots, number in work.mean.segments.items()
    )
    return decode + sum(
        number * times.prefill_s[bucket] for bucket, number in work.prefills.items()
    )


def learning_s(case: PlanCase, sizes: Sizes, micro_batch_s: float) -> float:
    """Seconds of one pass over a step's rollouts; smaller micro-batches take less in proportion."""
    config = sized(case.config, sizes)
    positions = packed_positions(config, case.lengths, sequences=config.rollout.size)
    return micro_batch_s * sum(positions) / sizes.micro_batch_tokens


def fastest_size(seconds: Mapping[int, float]) -> int:
    """The fastest size; of equally fast ones the smallest."""
    limit = (1 + _TIE) * min(seconds.values())
    return min(size for size, one in seconds.items() if one <= limit)
