"""Measured seconds of programs, and the expected lengths of prompts and completions. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from configs.schema import Config

Table = Mapping[int, float]
"""Seconds by size."""


@dataclass(frozen=True)
class Speeds:
    """Seconds of warm programs, host work included, and sizes that ran out of memory.

    A sampler measures its programs, a learner the micro-batches; other tables are empty.

    Attributes:
        device: description of the devices, those of the learner where both were measured; empty:
            nothing was measured yet.
        segment_s: seconds of a segment and of the check for finished slots, by slots of the
            sampler.
        prefill_s: seconds of a prefill, by prompt positions over all devices.
        fill_s: seconds of filling an eighth of the slots, by slots of the sampler.
        micro_batch_s: seconds of a micro-batch from host arrays to gradient, reference and teacher
            scoring included; by packed rows over all devices.
        room: the largest size that may fit, by setting of the plan, where larger ones ran out of
            memory.
    """

    device: str = ""
    segment_s: Table = field(default_factory=dict)
    prefill_s: Table = field(default_factory=dict)
    fill_s: Table = field(default_factory=dict)
    micro_batch_s: Table = field(default_factory=dict)
    room: Mapping[str, int] = field(default_factory=dict)

    def __or__(self, newer: Speeds) -> Speeds:
        """Adds measurements; newer ones replace older ones of the same size."""
        tables = {name: {**getattr(self, name), **getattr(newer, name)} for name in _TABLES}
        device = self.device or newer.device
        return Speeds(device, **tables, room=self.room).limited(newer.room)

    def limited(self, room: Mapping[str, int]) -> Speeds:
        """Adds sizes above which memory does not suffice."""
        known = self.room
        less = {name: min(size, known.get(name, size)) for name, size in room.items()}
        return replace(self, room={**known, **less})

    def scaled(self, factor: float) -> Speeds:
        """Multiplies all seconds by `factor`."""
        tables: dict[str, Table] = {
            name: {size: factor * seconds for size, seconds in getattr(self, name).items()}
            for name in _TABLES
        }
        return Speeds(self.device, **tables, room=self.room)

    def to_json(self) -> dict[str, Any]:
        """The speeds as the journal and the cache store them."""
        found: dict[str, Any] = _JSON.dump_python(self, mode="json")
        return found

    @staticmethod
    def of_json(found: Any) -> Speeds:
        """Reads the result of `to_json`.

        Raises:
            ValueError: if it is anything else.
        """
        return _JSON.validate_python(found)


_TABLES = ("segment_s", "prefill_s", "fill_s", "micro_batch_s")
_JSON = TypeAdapter(Speeds)


SIGMA = 0.8
"""Standard deviation of the logarithm of completion lengths, which are lognormal, as in
`launch.bench rollout`."""


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
            completion = rollout.expected_completion
        elif not 1 <= completion <= rollout.max_new_tokens:
            raise ValueError(
                f"command line: --completion-tokens {completion:g}: must be from 1 to "
                f"rollout.max_new_tokens = {rollout.max_new_tokens}"
            )
        return Lengths(rollout.expected_prompt, completion)
