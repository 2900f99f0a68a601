"""Expected lengths of prompts and completions."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import Config


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
    def expected(config: Config) -> Lengths:
        """The assumed lengths."""
        return Lengths(config.rollout.expected_prompt, config.rollout.expected_completion)
