"""The two sizes of a plan that a run may choose itself: slots and micro-batch tokens.

The configuration holds the given values, `Sizes` those of the run. `sized` combines them for
workers; the result is never written back to `config.json`. This module knows no devices and no
clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from configs import load
from configs.schema import Config

WorkerPhase = Literal["generate", "score", "update", "publish", "sync", "export", "load"]
"""Activity of a process: generating rollouts (prefill and decode), scoring, learning, publishing an
adapter, loading a published one, exporting the merged model, loading the base or a checkpoint."""

SHRUNK = 0.75
"""Upper bound of the next smaller size as a share: a program's memory falls by about as much."""
_TILE = 8
"""Devices compute rows in groups of eight, so larger sizes are multiples of eight."""


@dataclass(frozen=True)
class Sizes:
    """Slots of a sampler, and positions of a micro-batch over all devices of the learner."""

    slots: int
    micro_batch_tokens: int

    @staticmethod
    def of(config: Config) -> Sizes:
        """The sizes of a configuration that sets both."""
        return Sizes(config.slots, config.micro_batch_rows * config.row_tokens)

    def at_most(self, other: Sizes) -> Sizes:
        """Of each size the smaller one."""
        tokens = min(self.micro_batch_tokens, other.micro_batch_tokens)
        return Sizes(min(self.slots, other.slots), tokens)

    def to_json(self) -> dict[str, int]:
        """The sizes as `plan.json` and the journal store them."""
        return asdict(self)


def sized(config: Config, sizes: Sizes) -> Config:
    """The configuration with these sizes.

    Raises:
        ConfigError: if a size does not suit the other settings.
    """
    return validated(with_plan(config, asdict(sizes)))


def with_plan(config: Config, update: Mapping[str, object]) -> Config:
    """The configuration with other settings in [plan], not validated."""
    return config.model_copy(update={"plan": config.plan.model_copy(update=dict(update))})


def validated(config: Config) -> Config:
    """The same configuration after validation, with those slot buckets that suit its slots.

    Raises:
        ConfigError: if a setting of [plan] does not suit the others.
    """
    plan = config.plan
    buckets = plan.slot_buckets and plan.slot_ladder[1:]
    return load.validated({**config.model_dump(), "plan": dict(plan) | {"slot_buckets": buckets}})


def smaller(
    config: Config, sizes: Sizes, phase: WorkerPhase, *, share: float | None = None
) -> Sizes | None:
    """The next smaller sizes for a phase that ran out of memory.

    Phases of the learner reduce micro-batches; phases of the sampler, `sync` included, reduce
    slots. Both stay multiples of the number of shards. None if there are no smaller sizes, if the
    phase does not depend on sizes, or if no memory is available for it.

    Args:
        config: the run.
        sizes: the sizes that were too large.
        phase: the phase that ran out of memory.
        share: available memory as a share of the required memory; None: unknown. Memory falls no
            faster than sizes do, so no size that fits is skipped.
    """
    if phase == "load" or (share is not None and share <= 0):
        return None
    factor = SHRUNK if share is None else min(SHRUNK, share)
    if phase in {"generate", "sync"}:
        slots = _reduced(sizes.slots, config.plan.sampler_shards, factor)
        return None if slots is None else replace(sizes, slots=slots)
    unit = config.row_tokens * config.plan.learner_shards
    tokens = _reduced(sizes.micro_batch_tokens, unit, factor)
    return None if tokens is None else replace(sizes, micro_batch_tokens=tokens)


def _reduced(size: int, unit: int, factor: float) -> int | None:
    """The next smaller multiple of `unit`; None: `size` is the smallest."""
    count = size // unit
    if count == 1:
        return None
    reduced = max(1, int(factor * count))
    if reduced > 2 * _TILE:
        reduced -= reduced % _TILE
    return reduced * unit
