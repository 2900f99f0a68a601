"""Dynamic sampling (DAPO, arXiv:2503.14476, 3.2): further rounds of prompts in a step.

    sampled = prompts of the step -> groups with and without signal -> a further round while groups
              with signal are missing -> ...
    kept    = groups with signal first, as many groups as the step has prompts

Pure functions of counts. A group without signal has equal rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.types import Rollout

Group = Sequence[Rollout]


def round_size(missing: int, *, left: int, share: float) -> int:
    """Prompts of a round so that about `missing` of them have signal, at most `left`."""
    return min(left, math.ceil(missing / share))


def has_signal(group: Group) -> bool:
    """Whether the rewards of the group differ."""
    return len({rollout.reward for rollout in group if rollout.reward is not None}) > 1


@dataclass(frozen=True)
class Chosen:
    """The groups of a step.

    Attributes:
        kept: groups to train on, in sampling order.
        replaced: groups without signal that others replace.
        surplus: groups with signal that are not needed.
    """

    kept: list[Group]
    replaced: list[Group]
    surplus: list[Group]


def choose(groups: Sequence[Group], *, wanted: int) -> Chosen:
    """The first `wanted` groups with signal, filled up with the first groups without."""
    signal = [number for number, group in enumerate(groups) if has_signal(group)]
    others = [number for number, group in enumerate(groups) if not has_signal(group)]
    room = max(0, wanted - len(signal))
    kept = {*signal[:wanted], *others[:room]}
    return Chosen(
        kept=[group for number, group in enumerate(groups) if number in kept],
        replaced=[groups[number] for number in others[room:]],
        surplus=[groups[number] for number in signal[wanted:]],
    )
