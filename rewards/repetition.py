"""A penalty for repetition within a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import PositiveInt


def ngram_repetition(
    completion: str, *, n: PositiveInt = 4, unit: Literal["words", "characters"] = "words"
) -> float:
    """Minus the share of n-grams that repeat an earlier one; 0 without repetition, above -1.

    With N n-grams, D of them distinct, the score is D / N - 1 (as the repetition penalty of
    arXiv:2502.03373, for a whole completion). Case is ignored. 0 for texts shorter than n.

    >>> ngram_repetition("one two three one two three", n=3)
    -0.25
    >>> ngram_repetition("no no no no no", n=1)
    -0.8

    Known hacks:
        repetition without spaces ("aaaa"): is one word, which scores 0; use unit = "characters",
        with n of 10 or more.
        a counter in each repetition ("1. try 2. try"): avoids n-grams longer than its period; a
        smaller n finds it.
        empty and very short completions: score 0, the best; combine this part with one for the
        content.
    """
    text = completion.casefold()
    words: Sequence[str] = text.split() if unit == "words" else text
    ngrams = [tuple(words[begin : begin + n]) for begin in range(len(words) - n + 1)]
    return (len(set(ngrams)) - len(ngrams)) / len(ngrams) if ngrams else 0.0
