"""Measured seconds of programs, and the expected lengths of prompts and completions. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.schema import Config


@dataclass(frozen=True)
class SamplerTimes:
    """Seconds of a sampler's warm programs, host work included.

    Attributes:
        segment_s: of a segment with all slots busy, and of the check for finished ones, by slots.
        prefill_s: of a prefill and of filling the slots of its prompts, by prompt bucket.
    """

    segment_s: Mapping[int, float]
    prefill_s: Mapping[int, float]


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
