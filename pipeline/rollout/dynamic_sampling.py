"""Dynamic sampling (DAPO, arXiv:2503.14476, 3.2): how many more prompts a step draws, and why.

    drawn = the step's prompts -> groups with and without signal -> a further round, while some of
            the step's groups are without -> ...
    kept  = groups with signal first, as many groups as the step has prompts

Pure: knows counts and seconds, not what they are of. A group without signal has equal rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.contracts.rollouts import Rollout

_MEMORY = 0.9
"""What a step's observations still weigh a step later."""

Group = Sequence[Rollout]


@dataclass(frozen=True)
class Line:
    """Seconds as a straight line of a count: weighted least squares, neither part below zero.

    Attributes:
        weight, x, y, xx, xy: sums over what was observed.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observed(self, count: float, seconds: float) -> Line:
        """With another observation."""
        return Line(
            self.weight + 1,
            self.x + count,
            self.y + seconds,
            self.xx + count * count,
            self.xy + count * seconds,
        )

    def faded(self) -> Line:
        """With less weight on what was observed so far."""
        return Line(**{name: _MEMORY * value for name, value in vars(self).items()})

    def at(self, count: float) -> float:
        """Seconds that `count` is expected to take; at least one observation is needed.

        While all observations are of one count a smaller one is taken to last as long, because a
        device is no faster for being half empty, and a larger one in proportion.
        """
        mean, mean_s = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean * mean
        if spread <= 1e-6 * mean * mean:
            return mean_s * max(1.0, count / mean) if mean else mean_s
        slope = (self.xy / self.weight - mean * mean_s) / spread
        slope = min(max(slope, 0.0), mean_s / mean)
        return mean_s + slope * (count - mean)


@dataclass(frozen=True)
class Estimates:
    """What was measured of the steps so far; a later one weighs more.

    Attributes:
        signal: groups with signal.
        groups: groups in all.
        sampling: seconds of a round of so many prompts, rewards included.
        learning: seconds of an update, sync included, with so many groups with signal.
    """

    signal: float = 0.0
    groups: float = 0.0
    sampling: Line = Line()
    learning: Line = Line()

    @property
    def share(self) -> float:
        """Share of groups with signal, never quite none and never quite all."""
        return (self.signal + 0.5) / (self.groups + 1)

    def counted(self, signal: int, groups: int) -> Estimates:
        """With a round's groups."""
        return replace(self, signal=self.signal + signal, groups=self.groups + groups)

    def faded(self) -> Estimates:
        """As a new step begins."""
        return Estimates(
            _MEMORY * self.signal,
            _MEMORY * self.groups,
            self.sampling.faded(),
            self.learning.faded(),
        )

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint carries it."""
        return asdict(self)

    @staticmethod
    def of_json(row: Mapping[str, Any]) -> Estimates:
        """What `to_json` made."""
        lines = {name: Line(**row[name]) for name in ("sampling", "learning")}
        return Estimates(**{**row, **lines})


@dataclass(frozen=True)
class Gain:
    """Groups with signal for each second, of either way to go on.

    Attributes:
        sampling: by a further round in this step.
        learning: by learning from what there is, and the next step.
    """

    sampling: float
    learning: float


def round_size(missing: int, *, left: int, share: float) -> int:
    """Prompts to draw so that about `missing` of them have signal, at most `left`."""
    return min(left, math.ceil(missing / share))


def gain(
    estimates: Estimates, *, prompts: int, signal: int, wanted: int, prompts_per_step: int
) -> Gain | None:
    """What a round of `prompts` is worth against going on; None: too little was measured yet.

    With share p, round S(n) and update L(g) in seconds, a step that has g groups with signal:

        sampling   d / (S(n) + L(g + d) - L(g)),  d = min(p n, missing)
        learning   p N / (S(N) + L(p N)),         N = prompts_per_step

    Args:
        estimates: of p, S and L.
        prompts: n.
        signal: g.
        wanted: groups that the step is short of.
        prompts_per_step: N.
    """
    if not (estimates.sampling.weight and estimates.learning.weight):
        return None
    more = min(estimates.share * prompts, wanted)
    learning = estimates.learning
    cost_s = estimates.sampling.at(prompts) + learning.at(signal + more) - learning.at(signal)
    usual = estimates.share * prompts_per_step
    step_s = estimates.sampling.at(prompts_per_step) + learning.at(usual)
    return Gain(more / max(cost_s, 1e-9), usual / max(step_s, 1e-9))


def has_signal(group: Group) -> bool:
    """Whether its rewards, where it has any, differ."""
    return len({rollout.reward for rollout in group if rollout.reward is not None}) > 1


@dataclass(frozen=True)
class Chosen:
    """What a step learns from, and what it does not.

    Attributes:
        kept: groups that are learned from, in the order in which they were drawn.
        replaced: groups without signal for which others were drawn.
        surplus: groups with signal beyond what was needed.
    """

    kept: list[Group]
    replaced: list[Group]
    surplus: list[Group]


def choose(groups: Sequence[Group], *, wanted: int) -> Chosen:
    """The first `wanted` groups with signal; where there are fewer, first others beside them."""
    signal = [number for number, group in enumerate(groups) if has_signal(group)]
    others = [number for number, group in enumerate(groups) if not has_signal(group)]
    room = max(0, wanted - len(signal))
    kept = {*signal[:wanted], *others[:room]}
    return Chosen(
        kept=[group for number, group in enumerate(groups) if number in kept],
        replaced=[groups[number] for number in others[room:]],
        surplus=[groups[number] for number in signal[wanted:]],
    )
