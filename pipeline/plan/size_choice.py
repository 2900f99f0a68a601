"""The seconds of a step by measured size, and the sizes next to those in force.

The objective is trained tokens per second, not generated tokens per second: numbers of slots are
compared by the seconds of generating one step's rollouts, micro-batch sizes by the seconds of
training on them. The two are independent and are chosen separately; ties go to the smaller size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from configs.schema import Config
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.speeds import Lengths, Speeds, Table
from pipeline.plan.cost_model.workload import packed_positions, training_work
from pipeline.plan.search.fitting import PlanCase, estimate_plan
from pipeline.plan.search.size_options import max_useful_rows, max_useful_slots

SizeName = Literal["slots", "micro_batch_tokens"]
"""An attribute of `Sizes` and of `StepTimes`."""
_TIE = 0.005
"""Sizes whose seconds differ by at most this share count as equally fast."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step by measured size.

    Attributes:
        slots: seconds of generating a step's rollouts, by slots of a sampler.
        micro_batch_tokens: seconds of training on them, by tokens of a micro-batch.
        tokens: trained tokens of a step.
    """

    slots: Table
    micro_batch_tokens: Table
    tokens: float

    @staticmethod
    def of(case: PlanCase, speeds: Speeds, lengths: Lengths) -> StepTimes:
        """The times of all measured sizes that the run may use.

        Some slots were measured as the smaller bucket into which a larger sampler compacts its
        last rollouts.

        Args:
            case: the run; sizes that its configuration sets are upper bounds.
            speeds: the measured speeds, and the sizes that fit.
            lengths: mean lengths of the rollouts.
        """
        config, most = case.config, largest_sizes(case).at_most(speeds.room)
        unit, row = smallest_sizes(config), config.row_tokens
        tokens = [rows * row for rows in speeds.micro_batch_s]
        return StepTimes(
            {
                n: sampling_s(sized(config, replace(unit, slots=n)), speeds, lengths)
                for n in sorted(speeds.segment_s)
                if n <= most.slots
            },
            {
                n: learning_s(sized(config, replace(unit, micro_batch_tokens=n)), speeds, lengths)
                for n in sorted(tokens)
                if n <= most.micro_batch_tokens
            },
            config.rollout.size * lengths.completion,
        )

    @property
    def best(self) -> Sizes | None:
        """The fastest sizes; None: no slots or no micro-batch were measured."""
        if not self.slots or not self.micro_batch_tokens:
            return None
        return Sizes(fastest_size(self.slots), fastest_size(self.micro_batch_tokens))

    def seconds(self, sizes: Sizes) -> float | None:
        """Seconds of generating and training with these sizes; None: they were not measured."""
        sampling = self.slots.get(sizes.slots)
        learning = self.micro_batch_tokens.get(sizes.micro_batch_tokens)
        return None if sampling is None or learning is None else sampling + learning

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second of generating and training with the fastest sizes."""
        return self.tokens / (min(self.slots.values()) + min(self.micro_batch_tokens.values()))

    def to_json(self) -> dict[str, Any]:
        """The times as the journal stores them, to five significant digits."""
        return {
            "sampling_s": {str(size): _rounded(s) for size, s in self.slots.items()},
            "learning_s": {str(size): _rounded(s) for size, s in self.micro_batch_tokens.items()},
            "tokens_per_s": _rounded(self.tokens_per_s),
        }


def fastest_size(seconds: Table) -> int:
    """The fastest size; of equally fast ones the smallest."""
    limit = (1 + _TIE) * min(seconds.values())
    return min(size for size, one in seconds.items() if one <= limit)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# --- the sizes of a run


def smallest_sizes(config: Config) -> Sizes:
    """One slot on each device of a sampler, one row on each of the learner's."""
    return Sizes(config.plan.sampler_shards, config.row_tokens * config.plan.learner_shards)


def largest_sizes(case: PlanCase) -> Sizes:
    """The largest sizes that the configuration allows and that a step fills."""
    config, unit = case.config, smallest_sizes(case.config)
    useful = Sizes(
        max_useful_slots(config) * unit.slots,
        max_useful_rows(config, case.lengths) * unit.micro_batch_tokens,
    )
    bounds = config.plan.model_dump(include=set(useful.to_json()), exclude_none=True)
    return useful.at_most(bounds)


def neighbours(case: PlanCase, sizes: Sizes, name: SizeName) -> list[Sizes]:
    """The next larger sizes, if they are allowed and estimated to fit, and the next smaller ones.

    They are about twice and half as large: powers of two times the devices, or the largest size.

    Args:
        case: the run.
        sizes: sizes that fit.
        name: the one to change.
    """
    unit, most = (getattr(one, name) for one in (smallest_sizes(case.config), largest_sizes(case)))
    own: int = getattr(sizes, name)
    doublings = math.log2(own // unit)
    larger = replace(sizes, **{name: min(most, unit << round(doublings + 1))})
    smaller = replace(sizes, **{name: unit << max(0, round(doublings - 1))})
    found = []
    if getattr(larger, name) > own and estimate_plan(case, "", sized(case.config, larger)).fits:
        found.append(larger)
    if getattr(smaller, name) < own:
        found.append(smaller)
    return found


# --- the times of a step


def sampling_s(config: Config, speeds: Speeds, lengths: Lengths) -> float:
    """Seconds of generating a step's rollouts, by the decode schedule of a sampler.

    Args:
        config: the run, with sizes.
        speeds: measured times of at least one number of slots.
        lengths: expected lengths.
    """
    shards, work = config.plan.sampler_shards, training_work(config, lengths)
    decode = sum(
        number * seconds_at(speeds.segment_s, slots * shards)
        for slots, number in work.segments.items()
    )
    prefill = sum(
        number * seconds_at(speeds.prefill_s, config.prefill_rows(bucket) * bucket * shards)
        for bucket, number in work.prefills.items()
    )
    return decode + prefill + work.fills * seconds_at(speeds.fill_s, config.slots)


def learning_s(config: Config, speeds: Speeds, lengths: Lengths) -> float:
    """Seconds of training on a step's rollouts, without applying the update.

    Args:
        config: the run, with sizes.
        speeds: measured times of at least one micro-batch size.
        lengths: expected lengths.
    """
    batches = packed_positions(config, lengths, sequences=config.rollout.size)
    rows = (positions // config.row_tokens for positions in batches)
    one_pass = sum(seconds_at(speeds.micro_batch_s, number) for number in rows)
    return one_pass * config.learner.updates_per_batch


def seconds_at(table: Table, size: int) -> float:
    """Seconds of a size: those of a table that is not empty, linear between its sizes.

    Below the smallest its seconds count; above the largest they grow in proportion to the size.
    """
    sizes = sorted(table)
    within = float(np.interp(size, sizes, [table[one] for one in sizes]))
    return within * max(1.0, size / sizes[-1])
