"""Seconds that programs were measured to take, and what a step takes at that speed. No JAX.

What was not measured lies on a line between its neighbours; beyond them nothing is taken to be
faster than the nearest that was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from configs.schema import Config
from pipeline.plan.workload import Lengths, expected_turns, packed_positions

Table = Mapping[int, float]
"""Seconds by a size."""


@dataclass(frozen=True)
class SamplerSpeed:
    """Seconds of a sampler's programs, warm, with the host's part.

    Attributes:
        device: what they ran on.
        segment_s: of a segment and a look at what has ended, by slots of the sampler.
        prefill_s: of reading prompts, by the positions that are read at once, on all devices.
        fill_s: of letting an eighth of the slots' worth of newcomers in, by slots.
    """

    device: str
    segment_s: Table
    prefill_s: Table
    fill_s: Table


@dataclass(frozen=True)
class LearnerSpeed:
    """Seconds of a learner's programs, warm, with the host's part.

    Attributes:
        device: what they ran on.
        micro_batch_s: of a micro-batch, from the host's arrays to its gradient, what other
            policies are asked about it included; by packed rows over all devices.
    """

    device: str
    micro_batch_s: Table


@dataclass(frozen=True)
class Speeds:
    """All that was measured, and what had no room.

    Attributes:
        device: what it was measured on; empty: nothing was measured yet.
        segment_s: see `SamplerSpeed`; and so on.
        micro_batch_s: see `LearnerSpeed`.
        full_slots: slots of a sampler that ran out of memory.
        full_rows: rows of a micro-batch that did.
        last_s: seconds that the last size took to be compiled and measured.
    """

    device: str = ""
    segment_s: Table = field(default_factory=dict)
    prefill_s: Table = field(default_factory=dict)
    fill_s: Table = field(default_factory=dict)
    micro_batch_s: Table = field(default_factory=dict)
    full_slots: tuple[int, ...] = ()
    full_rows: tuple[int, ...] = ()
    last_s: float = 0.0

    def with_sampler(self, found: SamplerSpeed) -> Speeds:
        """With what was measured last in place of what was before."""
        return self._with(asdict(found))

    def with_learner(self, found: LearnerSpeed) -> Speeds:
        """Likewise."""
        return self._with(asdict(found))

    def _with(self, found: Mapping[str, Any]) -> Speeds:
        tables = {name: {**getattr(self, name), **found[name]} for name in found.keys() & _TABLES}
        return Speeds(**{**vars(self), **tables, "device": found["device"]})

    def without(self, *, slots: int | None = None, rows: int | None = None) -> Speeds:
        """With another size that had no room."""
        more_slots = {slots} - {None, *self.full_slots}
        more_rows = {rows} - {None, *self.full_rows}
        full = {
            "full_slots": (*self.full_slots, *more_slots),
            "full_rows": (*self.full_rows, *more_rows),
        }
        return Speeds(**{**vars(self), **full})

    def scaled(self, factor: float) -> Speeds:
        """Of a device on which all of it takes so many times as long."""
        tables = {
            name: {size: factor * seconds for size, seconds in getattr(self, name).items()}
            for name in _TABLES
        }
        return Speeds(**{**vars(self), **tables})

    def to_json(self) -> dict[str, Any]:
        """As the journal and what is kept have it."""
        tables = {
            name: {str(size): seconds for size, seconds in sorted(getattr(self, name).items())}
            for name in sorted(_TABLES)
        }
        full = {"full_slots": list(self.full_slots), "full_rows": list(self.full_rows)}
        return {"device": self.device, **tables, **full, "last_s": self.last_s}

    @staticmethod
    def of_json(found: Mapping[str, Any]) -> Speeds:
        """What `to_json` made."""
        tables = {
            name: {int(size): float(seconds) for size, seconds in found[name].items()}
            for name in _TABLES
        }
        full_slots, full_rows = tuple(found["full_slots"]), tuple(found["full_rows"])
        return Speeds(
            found["device"],
            **tables,
            full_slots=full_slots,
            full_rows=full_rows,
            last_s=float(found["last_s"]),
        )


_TABLES = {"segment_s", "prefill_s", "fill_s", "micro_batch_s"}


def sampling_s(config: Config, speeds: Speeds, lengths: Lengths) -> float:
    """Seconds in which a step's rollouts are drawn, by the schedule of a sampler's slots.

    Args:
        config: with sizes.
        speeds: at least one number of slots was measured.
        lengths: that are expected.
    """
    plan, rollout = config.plan, config.rollout
    shards, samples = plan.sampler_shards, rollout.group_size
    prompts = math.ceil(rollout.prompts_per_step / plan.num_samplers)
    turns = expected_turns(
        prompts * samples,
        mean=lengths.completion,
        cap=rollout.max_new_tokens,
        sizes=tuple(slots // shards for slots in plan.slots),
        segment_steps=config.segment_steps,
        shards=shards,
    )
    decode = sum(
        number * seconds_at(speeds.segment_s, slots * shards)
        for slots, number in turns.segments.items()
    )
    fill = turns.fills * seconds_at(speeds.fill_s, config.rollout_rows)
    bucket = config.prompt_bucket(min(round(lengths.prompt), rollout.max_prompt_tokens))
    rows = config.prefill_rows(bucket)
    reads = math.ceil(math.ceil(prompts / shards) / rows)
    return decode + fill + reads * seconds_at(speeds.prefill_s, rows * bucket * shards)


def learning_s(config: Config, speeds: Speeds, lengths: Lengths) -> float:
    """Seconds in which a step's rollouts are learned from, but for applying the update.

    Args:
        config: with sizes.
        speeds: at least one micro-batch was measured.
        lengths: that are expected.
    """
    batches = packed_positions(config, lengths, sequences=config.rollout.size)
    rows = (positions // config.row_tokens for positions in batches)
    once = sum(seconds_at(speeds.micro_batch_s, number) for number in rows)
    return once * config.learner.updates_per_batch


def seconds_at(table: Table, size: int) -> float:
    """Seconds of a size, by those that were measured; there must be one."""
    sizes = sorted(table)
    if size <= sizes[0]:
        return table[sizes[0]]
    if size >= sizes[-1]:
        return table[sizes[-1]] * size / sizes[-1]
    low, high = next((a, b) for a, b in pairwise(sizes) if a <= size <= b)
    share = (size - low) / (high - low)
    return (1 - share) * table[low] + share * table[high]
