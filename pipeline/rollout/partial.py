"""Splits the rollouts of a step at its cut-off: train now, continue later, or discard.

    requests = partial + new -> [samplers] -> finished or truncated
    keep   a group is trained on in the step in which its last rollout finishes; until then its
           finished rollouts wait with its truncated ones
    drop   truncated rollouts are discarded; the others of the group are trained on

Pure: a function of requests and completions, so a resumed run has the same groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from pipeline.types import Completion, RolloutRequest


@dataclass(frozen=True)
class PartialSplit:
    """The rollouts of a step after the cut-off.

    Attributes:
        finished: rollouts to train on: whole groups, or with "drop" what is left of them.
        partial: whole groups with rollouts that a later step continues, oldest first.
        tokens: tokens sampled in this step.
        truncated: number of rollouts truncated in this step.
        continued: number of rollouts that this step continued.
        dropped: number of rollouts discarded.
    """

    finished: list[Completion]
    partial: tuple[Completion, ...]
    tokens: int
    truncated: int
    continued: int
    dropped: int

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the cut-off."""
        counts = ("truncated", "continued", "dropped")
        metrics = {f"rollout/{name}": float(getattr(self, name)) for name in counts}
        return metrics | {"rollout/partial": float(len(self.partial))}


def continuations(partial: Sequence[Completion]) -> list[RolloutRequest]:
    """Requests that continue the truncated rollouts."""
    return [
        RolloutRequest(completion.name, completion.prompt_tokens, partial=completion)
        for completion in partial
        if completion.stop_reason == "truncated"
    ]


def split_partial(
    sampled: Sequence[Completion],
    earlier: Sequence[Completion],
    *,
    mode: Literal["off", "keep", "drop"],
) -> PartialSplit:
    """Splits the completions of a step.

    Args:
        sampled: completions of `continuations(earlier)` and of new groups, group by group.
        earlier: `PartialSplit.partial` of the step before.
        mode: `rollout.partial`: what happens to truncated rollouts.
    """
    found = {completion.name: completion for completion in sampled}
    old = [found.pop(completion.name, completion) for completion in earlier]
    all_rollouts = [*old, *found.values()]
    truncated = sum(completion.stop_reason == "truncated" for completion in sampled)
    finished: list[Completion] = []
    left: list[Completion] = []
    for _, members in groupby(all_rollouts, key=lambda completion: completion.name.group):
        group = list(members)
        own = [completion for completion in group if completion.stop_reason != "truncated"]
        if mode == "keep" and len(own) < len(group):
            left += group
        else:
            finished += own
    return PartialSplit(
        finished=finished,
        partial=tuple(left),
        tokens=sum(completion.num_new for completion in sampled),
        truncated=truncated,
        continued=len(sampled) - len(found),
        dropped=0 if mode == "keep" else truncated,
    )
