"""What a step's cut-off leaves: who waits for a later step, who is learned from, who is lost.

    asked for = waiting + new -> [samplers] -> ended or cut
    keep   a group goes on to the learner in the step in which the last of its rollouts ends;
           until then those that have ended wait with those that were cut
    drop   what was cut is lost, the others of its group go on without it

Pure: a function of what was asked for and what came back, so a resumed run has the same groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np

from pipeline.contracts.rollouts import Completion, RolloutName, RolloutRequest, VersionSpan

_ARRAYS = {
    "prompt_tokens": np.int32,
    "tokens": np.int32,
    "logprobs": np.float32,
    "processed_logprobs": np.float32,
}


@dataclass(frozen=True)
class PartialRollouts:
    """Whole groups of which at least one rollout has not ended, the oldest first.

    Attributes:
        completions: group by group.
    """

    completions: tuple[Completion, ...] = ()

    def __len__(self) -> int:
        """Rollouts, ended ones included."""
        return len(self.completions)

    def requests(self) -> list[RolloutRequest]:
        """Asks for the rest of those that were cut."""
        return [
            RolloutRequest(completion.name, completion.prompt_tokens, partial=completion)
            for completion in self.completions
            if completion.stop_reason == "truncated"
        ]

    def to_json(self) -> list[dict[str, Any]]:
        """All of it as JSON: a float32 is a number with as many digits as bring it back."""
        return [
            asdict(completion)
            | {
                key: None if array is None else array.tolist()
                for key in _ARRAYS
                for array in [getattr(completion, key)]
            }
            for completion in self.completions
        ]

    @staticmethod
    def of_json(rows: Iterable[Mapping[str, Any]]) -> PartialRollouts:
        """What `to_json` wrote."""
        return PartialRollouts(tuple(_completion(row) for row in rows))


@dataclass(frozen=True)
class PartialSplit:
    """What became of a step's rollouts.

    Attributes:
        ended: what is learned from: whole groups, or with "drop" what is left of them.
        waiting: what waits for the next step.
        tokens: that were drawn in this step.
        cut: rollouts that came back cut.
        continued: rollouts that had come back cut before and were asked for again.
        dropped: rollouts that are lost.
    """

    ended: list[Completion]
    waiting: PartialRollouts
    tokens: int
    cut: int
    continued: int
    dropped: int

    @property
    def metrics(self) -> dict[str, float]:
        """What W&B and the run folder are told."""
        counts = ("cut", "continued", "dropped")
        metrics = {f"rollout/{name}": float(getattr(self, name)) for name in counts}
        return metrics | {"rollout/waiting": float(len(self.waiting))}


def settle(
    drawn: Sequence[Completion],
    waiting: PartialRollouts,
    *,
    partial: Literal["off", "keep", "drop"],
) -> PartialSplit:
    """Says which of a step's rollouts are learned from.

    Args:
        drawn: what came back for `waiting.requests()` and for new groups, group by group.
        waiting: what waited before the step.
        partial: what is done with those that were cut.
    """
    found = {completion.name: completion for completion in drawn}
    held = [found.pop(completion.name, completion) for completion in waiting.completions]
    all_rollouts = [*held, *found.values()]
    cut = sum(completion.stop_reason == "truncated" for completion in drawn)
    ended: list[Completion] = []
    left: list[Completion] = []
    for _, members in groupby(all_rollouts, key=lambda completion: completion.name.group):
        group = list(members)
        own = [completion for completion in group if completion.stop_reason != "truncated"]
        if partial == "keep" and len(own) < len(group):
            left += group
        else:
            ended += own
    return PartialSplit(
        ended=ended,
        waiting=PartialRollouts(tuple(left)),
        tokens=sum(completion.num_new for completion in drawn),
        cut=cut,
        continued=len(drawn) - len(found),
        dropped=0 if partial == "keep" else cut,
    )


def _completion(row: Mapping[str, Any]) -> Completion:
    arrays = {
        key: None if row[key] is None else np.array(row[key], dtype)
        for key, dtype in _ARRAYS.items()
    }
    name = RolloutName(**row["name"])
    earlier_spans = tuple(VersionSpan(**span) for span in row["earlier_spans"])
    return Completion(**{**row, **arrays, "name": name, "earlier_spans": earlier_spans})
