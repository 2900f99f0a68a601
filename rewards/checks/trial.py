"""Tries reward functions on probes, in the processes that a run uses.

    together   all probes, those of one name at a time
    shuffled   the probes of some rows, in another order and other batches
    alone      the same, one by one, which also measures the time of a score
    again      the same once more

A probe that failed is not repeated. `rewards.checks.findings` says what the outcomes mean.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from configs.task import Rewards
from rewards.base import Outcome, RewardFacts
from rewards.checks.probes import Probe
from rewards.processes.host import RewardHost
from rewards.processes.log import RewardLog
from rewards.weighting import combine

REPEATED_ROWS = 4
"""Rows whose probes are scored shuffled, alone and again."""
_FAILED_IN_A_ROW = 2
"""Kinds of probes that may time out in all rows before a part is given up."""


@dataclass(frozen=True)
class Scored:
    """A probe with its scores.

    Attributes:
        probe: what was scored.
        outcomes: of each part.
        total: the weighted sum; None if there is none.
    """

    probe: Probe
    outcomes: Mapping[str, Outcome]
    total: float | None


@dataclass(frozen=True)
class Repeated:
    """The outcomes of one part for one probe, scored in four ways."""

    probe: Probe
    together: Outcome
    shuffled: Outcome
    alone: Outcome
    again: Outcome


@dataclass(frozen=True)
class Trial:
    """What the reward functions returned.

    Attributes:
        rewards: settings of the functions.
        facts: what the functions reported, by part.
        scored: the probes in order.
        repeated: by part; empty in a short trial.
        seconds: time of each score, by part, one at a time; empty in a short trial.
    """

    rewards: Rewards
    facts: Mapping[str, RewardFacts]
    scored: Sequence[Scored]
    repeated: Mapping[str, Sequence[Repeated]] = field(default_factory=dict)
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each part."""
        return {part.name: part.weight for part in self.rewards.functions}


Hosts = Mapping[str, RewardHost]


@asynccontextmanager
async def started(
    rewards: Rewards, *, log: RewardLog
) -> AsyncIterator[tuple[Hosts, dict[str, RewardFacts]]]:
    """A host for each function, and what the functions report; ends their processes at the end.

    Raises:
        ValueError: with a line for each function that cannot be used.
    """
    hosts = {
        part.name: RewardHost(rewards.model_copy(update={"functions": (part,)}), log=log)
        for part in rewards.functions
    }
    try:
        found = await asyncio.gather(
            *(host.start() for host in hosts.values()), return_exceptions=True
        )
        mistakes = [error for error in found if isinstance(error, BaseException)]
        others = [error for error in mistakes if not isinstance(error, ValueError)]
        if mistakes:
            raise others[0] if others else ValueError("\n".join(map(str, mistakes)))
        facts = [one for own in found if not isinstance(own, BaseException) for one in own]
        yield hosts, {one.name: one for one in facts}
    finally:
        for host in hosts.values():
            await host.close()


def count_scores(probes: Sequence[Probe], rewards: Rewards, *, short: bool) -> int:
    """How often `run_trial` reports progress, at most."""
    repeated = 0 if short else 3 * len(_repeated(probes))
    return (len(probes) + repeated) * len(rewards.functions)


async def run_trial(
    probes: Sequence[Probe],
    hosts: Hosts,
    *,
    rewards: Rewards,
    facts: Mapping[str, RewardFacts],
    short: bool = False,
    advance: Callable[[int], object] = lambda _: None,
) -> Trial:
    """Scores the probes.

    Args:
        probes: those of one name follow each other.
        hosts: from `started`.
        rewards: settings of the functions.
        facts: from `started`.
        short: without `repeated` and `seconds`.
        advance: is called with numbers of scores that are done.
    """
    together = await asyncio.gather(
        *(_together(host, name, probes, advance) for name, host in hosts.items())
    )
    by_part = dict(zip(hosts, together, strict=True))
    weights = {part.name: part.weight for part in rewards.functions}
    scored = []
    for index, probe in enumerate(probes):
        outcomes = {name: found[index] for name, found in by_part.items()}
        total = combine(outcomes, weights=weights)
        finite = total is not None and math.isfinite(total)
        scored.append(Scored(probe, outcomes, total if finite else None))
    if short:
        return Trial(rewards, facts, scored)
    repeated, seconds = dict[str, list[Repeated]](), dict[str, list[float]]()
    for name, host in hosts.items():  # one after the other: their times are measured
        chosen = [
            (probes[index], by_part[name][index])
            for index in _repeated(probes)
            if by_part[name][index].error is None
        ]
        repeated[name], seconds[name] = await _repeat(host, name, chosen, advance)
    return Trial(rewards, facts, scored, repeated, seconds)


async def _together(
    host: RewardHost, name: str, probes: Sequence[Probe], advance: Callable[[int], object]
) -> list[Outcome]:
    found, failed = list[Outcome](), 0
    # By name: what fails for one probe, such as a long text, does not give up the others.
    for _, own in itertools.groupby(probes, key=lambda probe: probe.name):
        inputs = [probe.given for probe in own]
        if failed < _FAILED_IN_A_ROW:
            group = [outcomes[name] for outcomes in await host.score(inputs)]
            failed = failed + 1 if all(map(_lost_its_process, group)) else 0
        else:
            error = found[-1].error
            assert error is not None
            group = [Outcome.failed(error.cause, f"given up: {error.message}")] * len(inputs)
        found += group
        advance(len(inputs))
    return found


def _lost_its_process(outcome: Outcome) -> bool:
    return outcome.error is not None and outcome.error.cause in {"timed_out", "died", "not_started"}


async def _repeat(
    host: RewardHost,
    name: str,
    chosen: Sequence[tuple[Probe, Outcome]],
    advance: Callable[[int], object],
) -> tuple[list[Repeated], list[float]]:
    order = list(range(len(chosen)))
    Random(0).shuffle(order)
    inputs = [probe.given for probe, _ in chosen]
    mixed = await host.score([inputs[index] for index in order])
    advance(len(order))
    shuffled = {index: outcomes[name] for index, outcomes in zip(order, mixed, strict=True)}
    rounds, seconds = list[list[Outcome]](), list[float]()
    for _ in range(2):
        outcomes = []
        for given in inputs:
            begin = time.perf_counter()
            outcomes.append((await host.score([given]))[0][name])
            seconds.append(time.perf_counter() - begin)
            advance(1)
        rounds.append(outcomes)
    alone, again = rounds
    repeated = [
        Repeated(probe, together, shuffled[index], alone[index], again[index])
        for index, (probe, together) in enumerate(chosen)
    ]
    return repeated, seconds


def _repeated(probes: Sequence[Probe]) -> list[int]:
    """Positions of the probes that are repeated."""
    return [index for index, probe in enumerate(probes) if probe.row < REPEATED_ROWS]
