"""Soft overlong punishment: length itself as a part of the reward."""

from __future__ import annotations


def overlong_punishment(length: int, *, budget: int, tokens: int) -> float:
    """0 for a completion that keeps away from its end, falling to -1 for one that reaches it.

    DAPO's shaping (arXiv:2503.14476, eq. 13): with L = length the part is

        0                               L <= budget - tokens
        (budget - tokens - L) / tokens  beyond that; -1 at L = budget

    Args:
        length: tokens of the completion.
        budget: tokens that it may have.
        tokens: so many of the last ones are punished.
    """
    return min(0.0, (budget - tokens - length) / tokens)
