"""Soft overlong punishment: a reward part for the length of a completion."""

from __future__ import annotations


def overlong_punishment(length: int, *, budget: int, tokens: int) -> float:
    """0 for short completions, falling linearly to -1 at the maximum length.

    DAPO's length penalty (arXiv:2503.14476, eq. 13): with L = length the part is

        0                               L <= budget - tokens
        (budget - tokens - L) / tokens  for longer completions; -1 at L = budget

    Args:
        length: tokens of the completion.
        budget: maximum tokens of a completion.
        tokens: width of the penalized range before `budget`.
    """
    return min(0.0, (budget - tokens - length) / tokens)
