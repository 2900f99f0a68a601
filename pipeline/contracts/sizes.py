"""How much is done at once: the two numbers of a plan that may change while a run goes on.

A configuration says what is wanted, sizes what is in force. `sized` puts them together for whoever
works; the result is never written back to `config.json`. Knows no devices and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from pydantic import ValidationError

from configs.errors import ConfigError, explain_validation
from configs.schema import Config

Phase = Literal["generate", "score", "update", "publish", "sync", "export", "load"]
"""What a process was doing: drawing (prompts, slots and segments alike), scoring, learning, handing
over an adapter, taking one over, writing the merged model, or loading the base or a checkpoint."""

SHRUNK = 0.75
"""The next smaller size is at most this share: a program's memory falls by about as much."""
_TILE = 8
"""Devices compute rows in eights: of more than two of these no others are worth a program."""


@dataclass(frozen=True)
class Sizes:
    """What is done at once.

    Attributes:
        slots: slots of a sampler.
        micro_batch_tokens: positions in one gradient program, over all devices of the learner.
    """

    slots: int
    micro_batch_tokens: int

    @staticmethod
    def of(config: Config) -> Sizes:
        """Those that a configuration names, which must name both."""
        return Sizes(config.slots, config.micro_batch_rows * config.row_tokens)

    @staticmethod
    def of_json(found: Mapping[str, int]) -> Sizes:
        """What `to_json` made."""
        return Sizes(found["slots"], found["micro_batch_tokens"])

    def at_most(self, other: Sizes) -> Sizes:
        """The smaller of both, each by itself."""
        return Sizes(
            min(self.slots, other.slots),
            min(self.micro_batch_tokens, other.micro_batch_tokens),
        )

    def to_json(self) -> dict[str, int]:
        """As `plan.json`, the journal and checkpoints carry them."""
        return asdict(self)


def sized(config: Config, sizes: Sizes) -> Config:
    """The configuration with these sizes in it; of `slot_buckets` those that are still smaller.

    Raises:
        ConfigError: if a size does not fit the rest of the configuration.
    """
    plan = config.plan
    changed = {**dict(plan), **asdict(sizes)}
    if plan.slot_buckets is not None:
        fewer = (size for size in plan.slot_buckets if size < sizes.slots)
        changed["slot_buckets"] = tuple(fewer)
    try:
        return Config.model_validate({**dict(config), "plan": changed})
    except ValidationError as error:
        tree = {**config.model_dump(), "plan": changed}
        raise ConfigError(*map(str, explain_validation(error, tree))) from None


def smaller(
    config: Config, sizes: Sizes, phase: Phase, *, share: float | None = None
) -> Sizes | None:
    """The next smaller sizes for a phase that ran out of memory.

    The learner works in micro-batches, whatever it does; the sampler in slots, also when it takes
    over an adapter. Both stay multiples of what the devices share.

    Args:
        config: of the run.
        sizes: which were too much.
        phase: for what.
        share: of the memory that these needed so much is there; None: that is not known. Memory
            falls no faster than sizes do, so none that would fit is passed over.

    Returns:
        None: there is nothing smaller, the phase does not depend on any size, or what is there
            beside it leaves room for none.
    """
    if phase == "load" or (share is not None and share <= 0):
        return None
    factor = SHRUNK if share is None else min(SHRUNK, share)
    if phase in {"generate", "sync"}:
        slots = _fewer(sizes.slots, config.plan.sampler_shards, factor)
        return None if slots is None else replace(sizes, slots=slots)
    unit = config.row_tokens * config.plan.learner_shards
    tokens = _fewer(sizes.micro_batch_tokens, unit, factor)
    return None if tokens is None else replace(sizes, micro_batch_tokens=tokens)


def _fewer(size: int, unit: int, factor: float) -> int | None:
    """The next smaller multiple of `unit`; None: `size` is the smallest."""
    count = size // unit
    if count == 1:
        return None
    fewer = max(1, int(factor * count))
    if fewer > 2 * _TILE:
        fewer -= fewer % _TILE
    return fewer * unit
