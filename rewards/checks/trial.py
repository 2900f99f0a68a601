"""Tries reward functions on probes, in the processes that a run uses.

All probes are scored together, those of one name at a time. Those of some rows are then scored
alone, which shows whether a value depends on other completions. A probe that failed is not
repeated. `rewards.checks.findings` says what the outcomes mean.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tqdm import tqdm

from configs.task import CONCURRENCY, Rewards
from rewards.base import Outcome, RewardFacts
from rewards.checks.probes import Probe
from rewards.processes.host import RewardHost
from rewards.weighting import combine

ALONE_ROWS = 4
"""Rows whose probes are also scored alone."""
_LOST = frozenset({"timed_out", "died", "not_started"})
"""Causes of errors that cost a process."""

Outcomes = Mapping[str, Outcome]
"""By part."""


@dataclass(frozen=True)
class Scored:
    """A probe with its outcomes, scored with other probes and, of some parts, alone.

    `total` is the weighted sum, if there is one.
    """

    probe: Probe
    outcomes: Outcomes
    total: float | None
    alone: Outcomes


@dataclass(frozen=True)
class Trial:
    """What the reward functions reported by part, and returned for the probes in order.

    `calls` are those that a process of a part makes at a time, more than one if it is async.
    `seconds` are those of a call for a completion, by part, as the median over the names of probes;
    a part of which every process died, or took too long, has none.
    """

    rewards: Rewards
    facts: Mapping[str, RewardFacts]
    scored: Sequence[Scored]
    calls: Mapping[str, int]
    seconds: Mapping[str, float]

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each part."""
        return {part.name: part.weight for part in self.rewards.functions}


async def run_trial(
    probes: Sequence[Probe],
    host: RewardHost,
    *,
    rewards: Rewards,
    facts: Sequence[RewardFacts],
    short: bool = False,
) -> Trial:
    """Scores the probes, of which those of one name follow each other, with a progress bar.

    `facts` are those of `host.start`; in a `short` trial nothing is scored alone.
    """
    weights = {part.name: part.weight for part in rewards.functions}
    forms = {one.name: one for one in facts}
    calls = {
        part.name: (part.concurrency or CONCURRENCY) if forms[part.name].kind == "async" else 1
        for part in rewards.functions
    }
    alone_rows = 0 if short else ALONE_ROWS
    count = len(probes) + sum(probe.row < alone_rows for probe in probes)
    with tqdm(total=count, unit="completion", delay=2, leave=False, disable=None) as bar:
        together, seconds = await _score_together(probes, host, bar, calls)
        scored = list[Scored]()
        for probe, outcomes in zip(probes, together, strict=True):
            total, alone = combine(outcomes, weights=weights), dict[str, Outcome]()
            if probe.row < alone_rows:
                failed = {name for name, one in outcomes.items() if one.error is not None}
                (alone,) = await host.score([probe.given], without=failed)
                bar.update()
            is_finite = total is not None and math.isfinite(total)
            scored.append(Scored(probe, outcomes, total if is_finite else None, alone))
    return Trial(rewards, forms, scored, calls, seconds)


async def _score_together(
    probes: Sequence[Probe], host: RewardHost, bar: tqdm[object], calls: Mapping[str, int]
) -> tuple[list[Outcomes], dict[str, float]]:
    """The outcomes of all probes, and `Trial.seconds`.

    A part that cost a process in all rows of a probe is given up.
    """
    found, given_up = list[Outcomes](), dict[str, Outcome]()
    seconds = defaultdict[str, list[float]](list)
    for _, group_probes in itertools.groupby(probes, key=lambda probe: probe.name):
        own = list(group_probes)
        inputs = [probe.given for probe in own]
        group = [outcomes | given_up for outcomes in await host.score(inputs, without=given_up)]
        busy_s = host.busy_s()
        for name in group[0].keys() - given_up.keys():
            errors = [error for outcomes in group if (error := outcomes[name].error) is not None]
            lost = [error for error in errors if error.cause in _LOST]
            if len(lost) == len(group) and own[0].kind != "case":
                given_up[name] = Outcome.failed(lost[0].cause, f"given up: {lost[0].message}")
            else:
                seconds[name].append(busy_s[name] / math.ceil(len(group) / calls[name]))
        found += group
        bar.update(len(group))
    return found, {name: median(of_groups) for name, of_groups in seconds.items()}
