"""Stop strings: the host checks the sampled tokens between two segments.

The end of a rollout is a function of its tokens alone, independent of when the host checks. This
module does not import the tokenizer; the engine receives the function that decodes tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

TextOf = Callable[[np.ndarray], str]
"""Decodes token ids, int32 `seq`. Each byte of an incomplete character becomes U+FFFD."""

_MARGIN = 8
"""Tokens without text that may occur inside a stop string."""


@dataclass(frozen=True)
class StopStrings:
    """Finds the first token that completes one of several strings.

    Attributes:
        strings: non-empty, without U+FFFD.
        text_of: decodes tokens.
    """

    strings: tuple[str, ...]
    text_of: TextOf

    @property
    def window(self) -> int:
        """Number of tokens that contain any string completed by the last of them.

        Each token has at least one byte.
        """
        return max(len(string.encode()) for string in self.strings) + _MARGIN

    def end(self, tokens: np.ndarray, *, new: int) -> int | None:
        """The smallest n for which the text of the last `window` of the first n tokens has a match.

        Args:
            tokens: all tokens of the rollout, int32 `seq`.
            new: number of last tokens that have not been checked yet. A larger number is allowed:
                tokens that have been checked without a match never match.

        Returns:
            Number of tokens that the rollout keeps; None if no new token completes a string.
        """
        checked = max(0, len(tokens) - new)
        # The usual case: one text that contains the windows of all new tokens has no match.
        if not self._matches(tokens[self._start(checked + 1) :]):
            return None
        ends = range(checked + 1, len(tokens) + 1)
        return next((end for end in ends if self._matches(tokens[self._start(end) : end])), None)

    def _start(self, end: int) -> int:
        return max(0, end - self.window)

    def _matches(self, tokens: np.ndarray) -> bool:
        text = self.text_of(tokens)
        return any(string in text for string in self.strings)
