"""Measured seconds of programs, and the expected lengths of prompts and completions. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from configs.schema import Config

Table = Mapping[int, float]
"""Seconds by size."""


@dataclass(frozen=True)
class SamplerSpeed:
    """Seconds of a sampler's warm programs, host work included.

    Attributes:
        device: device description.
        segment_s: seconds of a segment and of the check for finished slots, by slots of the
            sampler.
        prefill_s: seconds of a prefill, by prompt positions over all devices.
        fill_s: seconds of filling an eighth of the slots, by slots of the sampler.
    """

    device: str
    segment_s: Table
    prefill_s: Table
    fill_s: Table


@dataclass(frozen=True)
class LearnerSpeed:
    """Seconds of a learner's warm programs, host work included.

    Attributes:
        device: device description.
        micro_batch_s: seconds of a micro-batch from host arrays to gradient, reference and teacher
            scoring included; by packed rows over all devices.
    """

    device: str
    micro_batch_s: Table


@dataclass(frozen=True)
class Speeds:
    """Everything that was measured, and the sizes that ran out of memory.

    Attributes:
        device: device description; empty: nothing was measured yet.
        segment_s: see `SamplerSpeed`.
        prefill_s: see `SamplerSpeed`.
        fill_s: see `SamplerSpeed`.
        micro_batch_s: see `LearnerSpeed`.
        full_slots: slots of a sampler that ran out of memory.
        full_rows: rows of a micro-batch that ran out of memory.
        last_s: seconds of compiling and measuring the last size.
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
        """Adds a sampler's measurements; newer values replace older ones."""
        return self._with(asdict(found))

    def with_learner(self, found: LearnerSpeed) -> Speeds:
        """Adds a learner's measurements; newer values replace older ones."""
        return self._with(asdict(found))

    def _with(self, found: Mapping[str, Any]) -> Speeds:
        tables = {name: {**getattr(self, name), **found[name]} for name in found.keys() & _TABLES}
        return Speeds(**{**vars(self), **tables, "device": found["device"]})

    def with_full(self, *, slots: int | None = None, rows: int | None = None) -> Speeds:
        """Adds a size that ran out of memory."""
        more_slots = {slots} - {None, *self.full_slots}
        more_rows = {rows} - {None, *self.full_rows}
        full = {
            "full_slots": (*self.full_slots, *more_slots),
            "full_rows": (*self.full_rows, *more_rows),
        }
        return Speeds(**{**vars(self), **full})

    def scaled(self, factor: float) -> Speeds:
        """Multiplies all seconds by `factor`."""
        tables = {
            name: {size: factor * seconds for size, seconds in getattr(self, name).items()}
            for name in _TABLES
        }
        return Speeds(**{**vars(self), **tables})

    def to_json(self) -> dict[str, Any]:
        """The speeds as the journal and the cache store them."""
        tables = {
            name: {str(size): seconds for size, seconds in sorted(getattr(self, name).items())}
            for name in sorted(_TABLES)
        }
        full = {"full_slots": list(self.full_slots), "full_rows": list(self.full_rows)}
        return {"device": self.device, **tables, **full, "last_s": self.last_s}

    @staticmethod
    def of_json(found: Mapping[str, Any]) -> Speeds:
        """Reads the result of `to_json`."""
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
"""Completion lengths are lognormal: standard deviation of the logarithm, and mean as a share of the
cap, as in `launch.bench rollout`."""

PROMPT_SHARE = 0.5
"""Mean prompt length as a share of the longest."""


@dataclass(frozen=True)
class Lengths:
    """Mean lengths in tokens.

    Attributes:
        prompt: mean prompt length.
        completion: mean completion length.
    """

    prompt: float
    completion: float

    @property
    def sequence(self) -> float:
        """Mean length of prompt and completion together."""
        return self.prompt + self.completion

    @staticmethod
    def expected(config: Config, completion: float | None = None) -> Lengths:
        """The assumed lengths; `completion` replaces the assumption for completions.

        Raises:
            ValueError: if no completion can have that mean length.
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
