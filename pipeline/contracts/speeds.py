"""Seconds that programs were measured to take, and what a step takes at that speed. No JAX.

What was not measured lies on a line between its neighbours; beyond them nothing is taken to be
faster than the nearest that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from configs.schema import Config

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


SIGMA, MEAN_SHARE = 0.8, 0.35
"""Completions are lognormal with this deviation of the logarithm and this share of the cap as mean:
the lengths of `launch.bench rollout`."""

PROMPT_SHARE = 0.5
"""Mean of the prompts as a share of the longest."""


@dataclass(frozen=True)
class Lengths:
    """Mean tokens.

    Attributes:
        prompt: of a prompt.
        completion: of a completion.
    """

    prompt: float
    completion: float

    @property
    def sequence(self) -> float:
        """Of both."""
        return self.prompt + self.completion

    @staticmethod
    def expected(config: Config, completion: float | None = None) -> Lengths:
        """What is assumed; of completions, `completion` where somebody knows it.

        Raises:
            ValueError: if no completion can be that long on average.
        """
        rollout = config.rollout
        if completion is None:
            completion = MEAN_SHARE * rollout.max_new_tokens
        elif not 1 <= completion <= rollout.max_new_tokens:
            raise ValueError(
                f"command line: --completion-tokens {completion:g}: must be from 1 to "
                f"rollout.max_new_tokens = {rollout.max_new_tokens}"
            )
        return Lengths(max(1.0, PROMPT_SHARE * rollout.max_prompt_tokens), completion)
