"""Candidate sizes of a run and the choice among those whose speed was measured.

The objective is trained tokens per second, not generated tokens per second: numbers of slots are
compared by the seconds of generating one step's rollouts, micro-batch sizes by the seconds of
training on them. The two are independent and are chosen separately; ties go to the smaller size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from configs.schema import Config
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.speeds import Lengths, Speeds
from pipeline.plan.cost_model.measured_time import learning_s, sampling_s
from pipeline.plan.search.fitting import PlanCase, estimate_plan
from pipeline.plan.search.size_options import max_useful_rows, max_useful_slots

MAX_MULTIPLE = 8
"""Largest candidate as a multiple of the planned size: estimates may be wrong by this factor."""
_TIE = 0.005
"""Sizes whose seconds differ by at most this share count as equally fast."""


@dataclass(frozen=True)
class SizeLadder:
    """Sizes to measure, both in decreasing order.

    Attributes:
        slots: slots of a sampler: the number that generates a step's rollouts at once, and the
            powers of two below it, times the sampler's devices.
        rows: rows of a micro-batch: the number that a step fills, and the powers of two below it,
            times the learner's devices.
    """

    slots: tuple[int, ...]
    rows: tuple[int, ...]

    def top(self, config: Config) -> Sizes:
        """The largest number of slots with the largest micro-batch."""
        return Sizes(self.slots[0], self.rows[0] * config.row_tokens)

    @staticmethod
    def of(case: PlanCase, planned: Sizes) -> SizeLadder:
        """Sizes that are allowed, useful, estimated to fit, and near the planned ones.

        Args:
            case: the run; sizes that its configuration sets are upper bounds.
            planned: sizes on the ladder or above its top.
        """
        config, plan = case.config, case.config.plan
        slots, shards = plan.slots, plan.sampler_shards
        tokens, unit = plan.micro_batch_tokens, plan.learner_shards
        row = config.row_tokens
        if slots is None:
            slots = MAX_MULTIPLE * planned.slots
        if tokens is None:
            tokens = MAX_MULTIPLE * planned.micro_batch_tokens
        max_slots = min(slots // shards, max_useful_slots(config))
        max_rows = min(tokens // (row * unit), max_useful_rows(config, case.lengths))
        smallest = Sizes(shards, unit * row)
        return SizeLadder(
            tuple(
                n * shards
                for n in _rungs(max_slots)
                if _fits(case, Sizes(n * shards, smallest.micro_batch_tokens))
            )
            or (planned.slots,),
            tuple(
                n * unit
                for n in _rungs(max_rows)
                if _fits(case, Sizes(smallest.slots, n * unit * row))
            )
            or (planned.micro_batch_tokens // row,),
        )


def _rungs(largest: int) -> Iterator[int]:
    """`largest` and the powers of two below it, in decreasing order."""
    yield largest
    size = 1 << (largest - 1).bit_length()
    while (size := size // 2) >= 1:
        if size < largest:
            yield size


def _fits(case: PlanCase, sizes: Sizes) -> bool:
    return estimate_plan(case, "", sized(case.config, sizes)).fits


@dataclass(frozen=True)
class SizeChoice:
    """The chosen sizes and the seconds that they were compared by.

    Attributes:
        sizes: the sizes with the most trained tokens per second.
        sampling_s: seconds of generating a step's rollouts, by slots of a sampler.
        learning_s: seconds of training on them, by rows of a micro-batch.
        tokens_per_s: trained tokens per second of generating and training with `sizes`.
    """

    sizes: Sizes
    sampling_s: Mapping[int, float]
    learning_s: Mapping[int, float]
    tokens_per_s: float

    def seconds(self, slots: int, rows: int) -> float | None:
        """Seconds of generating and training with these sizes; None: they were not compared."""
        if slots not in self.sampling_s or rows not in self.learning_s:
            return None
        return self.sampling_s[slots] + self.learning_s[rows]

    def to_json(self) -> dict[str, Any]:
        """The choice as the journal stores it, to five significant digits."""
        return {
            "sizes": self.sizes.to_json(),
            "sampling_s": {str(size): _rounded(s) for size, s in self.sampling_s.items()},
            "learning_s": {str(size): _rounded(s) for size, s in self.learning_s.items()},
            "tokens_per_s": _rounded(self.tokens_per_s),
        }


@dataclass(frozen=True)
class Calibrated:
    """Result of measuring sizes.

    Attributes:
        case: the planner's input.
        ladder: the candidate sizes.
        speeds: the measured speeds.
        choice: the chosen sizes.
    """

    case: PlanCase
    ladder: SizeLadder
    speeds: Speeds
    choice: SizeChoice


def choose_sizes(
    config: Config, ladder: SizeLadder, speeds: Speeds, lengths: Lengths
) -> SizeChoice | None:
    """The best measured sizes of the ladder; None: no slots or no micro-batch were measured."""
    sampling = sampling_seconds(config, ladder, speeds, lengths)
    learning = learning_seconds(config, ladder, speeds, lengths)
    if not sampling or not learning:
        return None
    slots, rows = fastest_size(sampling), fastest_size(learning)
    seconds = sampling[slots] + learning[rows]
    tokens = config.rollout.size * lengths.completion
    sizes = Sizes(slots, rows * config.row_tokens)
    return SizeChoice(sizes, sampling, learning, tokens / seconds)


def sampling_seconds(
    config: Config, ladder: SizeLadder, speeds: Speeds, lengths: Lengths
) -> dict[int, float]:
    """Seconds of generating a step's rollouts, by the slots of the ladder that were measured.

    Some were measured as the smaller bucket into which a larger sampler compacts its last rollouts.
    """
    return {
        slots: sampling_s(_at(config, ladder, slots=slots), speeds, lengths)
        for slots in ladder.slots
        if slots in speeds.segment_s and slots not in speeds.full_slots
    }


def learning_seconds(
    config: Config, ladder: SizeLadder, speeds: Speeds, lengths: Lengths
) -> dict[int, float]:
    """Seconds of training on a step's rollouts, by the rows of the ladder that were measured."""
    return {
        rows: learning_s(_at(config, ladder, rows=rows), speeds, lengths)
        for rows in ladder.rows
        if rows in speeds.micro_batch_s and rows not in speeds.full_rows
    }


def mark_full(
    speeds: Speeds, ladder: SizeLadder, *, requested: Sizes, fitting: Sizes, row: int
) -> Speeds:
    """Marks the sizes of the ladder that out-of-memory errors have ruled out.

    Args:
        speeds: the measured speeds.
        ladder: the candidate sizes.
        requested: sizes that the workers were prepared for.
        fitting: sizes that remained in force; smaller than `requested` after out-of-memory errors.
        row: positions of a packed row.
    """
    if fitting.slots < requested.slots:
        for slots in (slots for slots in ladder.slots if slots > fitting.slots):
            speeds = speeds.with_full(slots=slots)
    if fitting.micro_batch_tokens < requested.micro_batch_tokens:
        for rows in (rows for rows in ladder.rows if rows * row > fitting.micro_batch_tokens):
            speeds = speeds.with_full(rows=rows)
    return speeds


def fastest_size(seconds: Mapping[int, float]) -> int:
    """The fastest size; of equally fast ones the smallest."""
    limit = (1 + _TIE) * min(seconds.values())
    return min(size for size, one in seconds.items() if one <= limit)


def estimated_seconds(
    case: PlanCase, ladder: SizeLadder, choice: SizeChoice
) -> dict[str, dict[str, float]]:
    """The planner's estimates for the measured sizes, for comparison, as JSON values."""

    def seconds(slots: int | None, rows: int | None, phases: tuple[str, ...]) -> float:
        step = case.step(_at(case.config, ladder, slots=slots, rows=rows))
        return _rounded(sum(step.seconds[phase].expected for phase in phases))

    found = {
        "sampling_s": {n: seconds(n, None, ("prefill", "decode")) for n in choice.sampling_s},
        "learning_s": {n: seconds(None, n, ("score", "update")) for n in choice.learning_s},
    }
    return {name: {str(size): s for size, s in table.items()} for name, table in found.items()}


def still_improves(seconds: Mapping[int, float], sizes: Sequence[int]) -> bool:
    """Whether a smaller size may be the best: one of the last two measured is the best so far.

    Args:
        seconds: seconds by size.
        sizes: sizes in the order of measurement; those after the first unmeasured one are ignored.
    """
    known = list(takewhile(seconds.__contains__, sizes))
    return not known or fastest_size({size: seconds[size] for size in known}) in known[-2:]


def _at(
    config: Config, ladder: SizeLadder, *, slots: int | None = None, rows: int | None = None
) -> Config:
    """The configuration with these sizes; one that is left out is the smallest of the ladder."""
    slots = ladder.slots[-1] if slots is None else slots
    rows = ladder.rows[-1] if rows is None else rows
    return sized(config, Sizes(slots, rows * config.row_tokens))


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
