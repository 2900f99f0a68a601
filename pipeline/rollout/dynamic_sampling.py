"""Dynamic sampling (DAPO, arXiv:2503.14476, 3.2): further rounds of prompts in a step.

    sampled = prompts of the step -> groups with and without signal -> a further round while groups
              with signal are missing -> ...
    kept    = groups with signal first, as many groups as the step has prompts

Pure functions of counts. A group without signal has equal rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.types import Rollout

Group = Sequence[Rollout]


def round_size(missing: int, *, left: int, signal: int, groups: int) -> int:
    """Prompts of a round so that about `missing` of them have signal, at most `left`.

    As `signal` of the `groups` so far have; the estimate of their share is above 0 and below 1.
    """
    return min(left, math.ceil(missing / ((signal + 0.5) / (groups + 1))))


def has_signal(group: Group) -> bool:
    """Whether the rewards of the group differ."""
    return len({rollout.reward for rollout in group if rollout.reward is not None}) > 1


def choose(groups: Sequence[Group], *, wanted: int) -> list[Group]:
    """The first `wanted` groups with signal, filled up with the first without, in their order."""
    ranked = sorted(range(len(groups)), key=lambda number: not has_signal(groups[number]))
    return [groups[number] for number in sorted(ranked[:wanted])]
