"""Text that ends a rollout: found by the host, between two segments, in the tokens drawn so far.

Where a rollout ends is a function of its tokens alone, never of when somebody looked. Knows no
tokenizer: whoever makes the engine says what tokens read as.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

TextOf = Callable[[np.ndarray], str]
"""The text of token ids, int32 `seq`. Bytes that make no whole character become U+FFFD each."""

_MARGIN = 8
"""Tokens without any text that may stand inside a stop string."""


@dataclass(frozen=True)
class StopStrings:
    """Looks for the first token that completes one of some strings.

    Attributes:
        strings: none is empty, none holds U+FFFD.
        text_of: what tokens read as.
    """

    strings: tuple[str, ...]
    text_of: TextOf

    @property
    def window(self) -> int:
        """Tokens that surely hold a string which their last one completes: each has a byte."""
        return max(len(string.encode()) for string in self.strings) + _MARGIN

    def end(self, tokens: np.ndarray, *, new: int) -> int | None:
        """The smallest n such that the text of the `window` tokens before place n holds a string.

        Args:
            tokens: all that a rollout has drawn, int32 `seq`.
            new: so many last ones were not looked at yet. More may be said: what was looked at
                and did not end the rollout never does.

        Returns:
            How many tokens the rollout keeps; None: no string was completed among the new ones.
        """
        seen = max(0, len(tokens) - new)
        # Most rollouts, most of the time: one text holds those of all windows.
        if not self._said(tokens[self._start(seen + 1) :]):
            return None
        ends = range(seen + 1, len(tokens) + 1)
        return next((end for end in ends if self._said(tokens[self._start(end) : end])), None)

    def _start(self, end: int) -> int:
        return max(0, end - self.window)

    def _said(self, tokens: np.ndarray) -> bool:
        text = self.text_of(tokens)
        return any(string in text for string in self.strings)
