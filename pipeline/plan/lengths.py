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
