"""Length shaping: rewards for the length of a completion in words or characters.

There is no tokenizer here; `overlong_punishment` is given the tokens that were sampled.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from configs.task import AnswerPlace
from rewards.answers import is_correct
from rewards.base import Tags

Unit = Literal["words", "characters"]
"""Words are separated by white space; characters are counted without white space."""


def length_of(text: str, unit: Unit) -> int:
    """Length of a text; white space does not count, so that padding with it gains nothing.

    >>> length_of("two  words", "words"), length_of("two  words", "characters")
    (2, 8)
    """
    words = text.split()
    if unit == "words":
        return len(words)
    return sum(map(len, words))


def length_range(
    completion: str,
    *,
    minimum: NonNegativeInt = 0,
    maximum: PositiveInt,
    margin: PositiveInt,
    unit: Unit = "words",
) -> float:
    """1 for lengths from `minimum` to `maximum`, falling linearly to 0 over `margin` outside.

    >>> [length_range("word " * n, minimum=10, maximum=20, margin=10) for n in (5, 15, 22, 40)]
    [0.5, 1.0, 0.8, 0.0]

    Known hacks:
        filling up with repeated words: scores 1; combine this part with
        `rewards.repetition:ngram_repetition`.
        long words (unit = "words"): a text without spaces is one word.

    Raises:
        ValueError: if `minimum` is above `maximum`.
    """
    if minimum > maximum:
        raise ValueError(f"minimum = {minimum} is above maximum = {maximum}")
    length = length_of(completion, unit)
    outside = max(minimum - length, length - maximum, 0)
    return max(0.0, 1 - outside / margin)


def cosine_length(
    completion: str,
    *,
    answer: str,
    stop_reason: str,
    tags: Tags,
    maximum: PositiveInt,
    correct: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    overlong: float = -1.0,
    unit: Unit = "words",
    extraction: AnswerPlace | None = None,
) -> float:
    """Cosine reward for correctness and length: short if correct, long if wrong.

    With L = length, M = maximum and (a, b) = `correct` or `wrong` the score is

        b + (a - b) (1 + cos(pi L / M)) / 2

    which is a at L = 0 and b at L = M (arXiv:2502.03373, section 4.2): a correct answer is better
    if it is shorter, a wrong one is worse if it is shorter. Truncated completions, and those
    longer than `maximum`, score `overlong`. The answer is compared as by `exact_answer`, which has
    the same `extraction`.

    >>> score = partial(cosine_length, answer="2", stop_reason="eos", tags=tags, maximum=4)
    >>> score("<answer>2</answer>"), score("1 + 1 = <answer>2</answer>")
    (0.926..., -1.0)
    >>> score("1 + 1 <answer>2</answer>"), score("1 + 1 <answer>3</answer>")
    (0.5, -0.5)

    Known hacks:
        long nonsense without an answer: scores `wrong`'s second value, better than a short honest
        error. It stays below every correct answer; combine this part with
        `rewards.repetition:ngram_repetition`, as the paper does.

    """
    length = length_of(completion, unit)
    if stop_reason == "length" or length > maximum:
        return overlong
    right = is_correct(completion, answer=answer, tags=tags, extraction=extraction)
    first, last = correct if right else wrong
    return last + (first - last) * (1 + math.cos(math.pi * length / maximum)) / 2


def overlong_punishment(length: int, *, budget: int, tokens: int) -> float:
    """0 for short completions, falling linearly to -1 at the maximum length.

    DAPO's length penalty (arXiv:2503.14476, eq. 13): with L = length, all in tokens, the part is

        0                               L <= budget - tokens
        (budget - tokens - L) / tokens  for longer completions; -1 at L = budget
    """
    return min(0.0, (budget - tokens - length) / tokens)
