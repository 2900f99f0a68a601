"""Chooses sizes by what was measured: those with the most trained tokens a second.

Not those that draw the most tokens: slots are compared by the seconds that a step's own rollouts
take, micro-batches by the seconds in which these are learned from. The two do not depend on one
another, so each is chosen by itself; of equal ones the smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from configs.schema import Config
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.speeds import Lengths, Speeds
from pipeline.plan.cost_model.speeds import learning_s, sampling_s
from pipeline.plan.ladder import Ladder
from pipeline.plan.search.search import Case

_NEAR = 0.005
"""Sizes that are as fast to within this share are equal."""


@dataclass(frozen=True)
class Choice:
    """Sizes, and what they were compared by.

    Attributes:
        sizes: with the most trained tokens a second.
        sampling_s: seconds in which a step's rollouts are drawn, by slots of a sampler.
        learning_s: seconds in which they are learned from, by rows of a micro-batch.
        tokens_per_s: trained tokens a second while drawing and learning with these sizes.
    """

    sizes: Sizes
    sampling_s: Mapping[int, float]
    learning_s: Mapping[int, float]
    tokens_per_s: float

    def seconds(self, slots: int, rows: int) -> float | None:
        """Of drawing and learning with these sizes; None: they were not compared."""
        if slots not in self.sampling_s or rows not in self.learning_s:
            return None
        return self.sampling_s[slots] + self.learning_s[rows]

    def to_json(self) -> dict[str, Any]:
        """As the journal has it, to five digits."""
        return {
            "sizes": self.sizes.to_json(),
            "sampling_s": {str(size): _short(s) for size, s in self.sampling_s.items()},
            "learning_s": {str(size): _short(s) for size, s in self.learning_s.items()},
            "tokens_per_s": _short(self.tokens_per_s),
        }


def choose_sizes(config: Config, ladder: Ladder, speeds: Speeds, lengths: Lengths) -> Choice | None:
    """The best of what was measured on the ladder; None: a part of it was not measured at all."""
    sampling = drawing_seconds(config, ladder, speeds, lengths)
    learning = learning_seconds(config, ladder, speeds, lengths)
    if not sampling or not learning:
        return None
    slots, rows = best(sampling), best(learning)
    seconds = sampling[slots] + learning[rows]
    tokens = config.rollout.size * lengths.completion
    sizes = Sizes(slots, rows * config.row_tokens)
    return Choice(sizes, sampling, learning, tokens / seconds)


def drawing_seconds(
    config: Config, ladder: Ladder, speeds: Speeds, lengths: Lengths
) -> dict[int, float]:
    """Seconds in which a step's rollouts are drawn, by the slots of the ladder that were measured.

    Some were measured as what a larger sampler moves its last rollouts into.
    """
    return {
        slots: sampling_s(_at(config, ladder, slots=slots), speeds, lengths)
        for slots in ladder.slots
        if slots in speeds.segment_s and slots not in speeds.full_slots
    }


def learning_seconds(
    config: Config, ladder: Ladder, speeds: Speeds, lengths: Lengths
) -> dict[int, float]:
    """Seconds in which they are learned from, by the rows of the ladder that were measured."""
    return {
        rows: learning_s(_at(config, ladder, rows=rows), speeds, lengths)
        for rows in ladder.rows
        if rows in speeds.micro_batch_s and rows not in speeds.full_rows
    }


def best(seconds: Mapping[int, float]) -> int:
    """The fastest size; of those that are as fast the smallest."""
    most = (1 + _NEAR) * min(seconds.values())
    return min(size for size, one in seconds.items() if one <= most)


def estimated(case: Case, ladder: Ladder, choice: Choice) -> dict[str, dict[str, float]]:
    """What the planner expected of the same sizes, for comparison, as JSON values."""

    def seconds(slots: int | None, rows: int | None, phases: tuple[str, ...]) -> float:
        step = case.step(_at(case.config, ladder, slots=slots, rows=rows))
        return _short(sum(step.seconds[phase].expected for phase in phases))

    found = {
        "sampling_s": {n: seconds(n, None, ("prefill", "decode")) for n in choice.sampling_s},
        "learning_s": {n: seconds(None, n, ("score", "update")) for n in choice.learning_s},
    }
    return {what: {str(size): s for size, s in table.items()} for what, table in found.items()}


def still_improves(seconds: Mapping[int, float], sizes: Sequence[int]) -> bool:
    """Whether a smaller size may be the best: one of the last two known is the best so far.

    Args:
        seconds: by size.
        sizes: in the order in which they are tried; only those before the first unknown one count.
    """
    known = list(takewhile(seconds.__contains__, sizes))
    return not known or best({size: seconds[size] for size in known}) in known[-2:]


def _at(
    config: Config, ladder: Ladder, *, slots: int | None = None, rows: int | None = None
) -> Config:
    """With these sizes; what is not said does not matter and is the smallest."""
    slots = ladder.slots[-1] if slots is None else slots
    rows = ladder.rows[-1] if rows is None else rows
    return sized(config, Sizes(slots, rows * config.row_tokens))


def _short(value: float) -> float:
    return float(f"{value:.5g}")


@dataclass(frozen=True)
class Calibrated:
    """What was found.

    Attributes:
        case: what was measured for.
        ladder: what could be chosen.
        speeds: what was measured.
        choice: what was taken.
    """

    case: Case
    ladder: Ladder
    speeds: Speeds
    choice: Choice


def without_room(speeds: Speeds, ladder: Ladder, *, asked: Sizes, got: Sizes, row: int) -> Speeds:
    """With all sizes above those that a lack of memory has left.

    Args:
        speeds: what was measured.
        ladder: what could be chosen.
        asked: sizes that were to be in force.
        got: that are; smaller than `asked` where memory ran out.
        row: positions of a packed row.
    """
    if got.slots < asked.slots:
        for slots in (slots for slots in ladder.slots if slots > got.slots):
            speeds = speeds.without(slots=slots)
    if got.micro_batch_tokens < asked.micro_batch_tokens:
        for rows in (rows for rows in ladder.rows if rows * row > got.micro_batch_tokens):
            speeds = speeds.without(rows=rows)
    return speeds
