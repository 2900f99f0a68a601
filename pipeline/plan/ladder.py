"""The sizes that are measured, the largest that is plausible first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from configs.schema import Config
from pipeline.contracts.sizes import Sizes, sized
from pipeline.plan.search.options import most_rows, most_slots
from pipeline.plan.search.search import Case, measured

ABOVE = 8
"""What is estimated may be wrong by so much: larger sizes than this multiple are not tried."""


@dataclass(frozen=True)
class Ladder:
    """Sizes to measure, each falling.

    Attributes:
        slots: of a sampler: what a step's own rollouts take at once, and the powers of two below,
            for each of its devices.
        rows: of a micro-batch: what a step fills, and the powers of two below, for each of the
            learner's devices.
    """

    slots: tuple[int, ...]
    rows: tuple[int, ...]

    def top(self, config: Config) -> Sizes:
        """The largest of both."""
        return Sizes(self.slots[0], self.rows[0] * config.row_tokens)

    @staticmethod
    def of(case: Case, planned: Sizes) -> Ladder:
        """Up to what is allowed, of use, not far from what is planned and estimated to fit.

        Args:
            case: what is planned; sizes that its configuration gives are the most allowed.
            planned: sizes that are on the ladder or above its top.
        """
        config, plan = case.config, case.config.plan
        slots, shards = plan.slots, plan.sampler_shards
        rows, unit = plan.micro_batch_tokens, plan.learner_shards
        row = config.row_tokens
        if slots is None:
            slots = ABOVE * planned.slots
        if rows is None:
            rows = ABOVE * planned.micro_batch_tokens
        most_each = min(slots // shards, most_slots(config))
        rows_each = min(rows // (row * unit), most_rows(config, case.lengths))
        small = Sizes(shards, unit * row)
        return Ladder(
            tuple(
                n * shards
                for n in _rungs(most_each)
                if _fits(case, Sizes(n * shards, small.micro_batch_tokens))
            )
            or (planned.slots,),
            tuple(
                n * unit
                for n in _rungs(rows_each)
                if _fits(case, Sizes(small.slots, n * unit * row))
            )
            or (planned.micro_batch_tokens // row,),
        )


def _rungs(most: int) -> Iterator[int]:
    """`most` and the powers of two below it, falling."""
    yield most
    size = 1 << (most - 1).bit_length()
    while (size := size // 2) >= 1:
        if size < most:
            yield size


def _fits(case: Case, sizes: Sizes) -> bool:
    return measured(case, "", sized(case.config, sizes)).fits
