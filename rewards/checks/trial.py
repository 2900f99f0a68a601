"""Tries reward functions on probes, in the processes that a run uses.

All probes are scored together, those of one name at a time. Those of some rows are then scored
alone, which measures the time of a score and shows whether it depends on other completions. A probe
that failed is not repeated. `rewards.checks.findings` says what the outcomes mean.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from configs.task import Rewards
from rewards.base import Outcome, RewardFacts
from rewards.checks.probes import Probe
from rewards.processes.host import RewardHost
from rewards.weighting import combine

ALONE_ROWS = 4
"""Rows whose probes are also scored alone."""
_FAILED_IN_A_ROW = 2
"""Kinds of probes that may time out in all rows before a part is given up."""

Outcomes = Mapping[str, Outcome]
"""By part."""


@dataclass(frozen=True)
class Scored:
    """A probe with its scores.

    Attributes:
        probe: what was scored.
        outcomes: of each part, scored with other probes.
        total: the weighted sum; None if there is none.
        alone: of the parts that were also called with this probe alone.
    """

    probe: Probe
    outcomes: Outcomes
    total: float | None
    alone: Outcomes


@dataclass(frozen=True)
class Trial:
    """What the reward functions returned.

    Attributes:
        rewards: settings of the functions.
        facts: what the functions reported, by part.
        scored: the probes in order.
        seconds: time of each score, by part, one at a time; empty in a short trial.
    """

    rewards: Rewards
    facts: Mapping[str, RewardFacts]
    scored: Sequence[Scored]
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)

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
    """Scores the probes, with a progress bar.

    Args:
        probes: those of one name follow each other.
        host: started.
        rewards: settings of the functions.
        facts: from `RewardHost.start`.
        short: nothing is scored alone.
    """
    weights = {part.name: part.weight for part in rewards.functions}
    total = len(probes) + (0 if short else sum(probe.row < ALONE_ROWS for probe in probes))
    with tqdm(total=total, unit="completion", delay=2, leave=False, disable=None) as bar:
        together = await _score_together(probes, host, list(weights), bar)
        scored, seconds = [], dict[str, list[float]]()
        host.busy_s()
        for probe, outcomes in zip(probes, together, strict=True):
            value, alone = combine(outcomes, weights=weights), dict[str, Outcome]()
            if not short and probe.row < ALONE_ROWS:
                failed = {name for name, one in outcomes.items() if one.error is not None}
                (alone,) = await host.score([probe.given], without=failed)
                busy_s = host.busy_s()
                for name in alone:
                    seconds.setdefault(name, []).append(busy_s[name])
                bar.update()
            is_finite = value is not None and math.isfinite(value)
            scored.append(Scored(probe, outcomes, value if is_finite else None, alone))
    return Trial(rewards, {one.name: one for one in facts}, scored, seconds)


async def _score_together(
    probes: Sequence[Probe], host: RewardHost, names: Sequence[str], bar: tqdm[object]
) -> list[Outcomes]:
    """The outcomes of all probes; a part is given up that times out again and again."""
    found = list[Outcomes]()
    failed, given_up = Counter[str](), dict[str, Outcome]()
    # By name: what fails for one probe, such as a long text, does not give up the others.
    for _, own in itertools.groupby(probes, key=lambda probe: probe.name):
        inputs = [probe.given for probe in own]
        group = [outcomes | given_up for outcomes in await host.score(inputs, without=given_up)]
        for name in set(names) - given_up.keys():
            errors = [outcomes[name].error for outcomes in group]
            lost = [one for one in errors if one is not None and one.cause in _LOST]
            failed[name] = failed[name] + 1 if len(lost) == len(group) else 0
            if failed[name] == _FAILED_IN_A_ROW:
                given_up[name] = Outcome.failed(lost[0].cause, f"given up: {lost[0].message}")
        found += group
        bar.update(len(group))
    return found


_LOST = frozenset({"timed_out", "died", "not_started"})
"""Causes of errors that cost a process."""
