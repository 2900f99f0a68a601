"""Descriptions of data: counts add up, tokens are exact, duplicates and overlaps are found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeline.data.inspection import answer_lengths, histogram, repetitions
from pipeline.data.splits import LoadedSplit
from pipeline.types import Prompt
from tests.samples import CharTokenizer


def _split(*texts: str, answers: str | None = None) -> LoadedSplit:
    prompts = [
        Prompt(n, text, np.array([2, *map(ord, text)], np.int32), (answers or "1" * 99)[n - 1], {})
        for n, text in enumerate(texts, start=1)
    ]
    return LoadedSplit(tuple(prompts), malformed=(), too_long=(), duplicates=0)


def test_a_histogram():
    lengths = [3] * 2 + [4] + [7] * 10 + [12] + [15]
    assert list(histogram("tokens", lengths, limit=12, width=30)) == [
        "tokens: 15 of 3 to 15, median 7, 99% at most 15; limit 12, 1 above it",
        "         3  2 ###",
        "         4  1 ##",
        "         5  0",
        "         6  0",
        "         7 10 ################",
        "         8  0",
        "         9  0",
        "        10  0",
        "        11  0",
        "        12  1 ##",
        "  above 12  1 ##",
    ]


def test_reference_answers_are_measured():
    line = answer_lengths("test", _split("a", "b"), tokenizer=CharTokenizer())
    expected = "2 of 1 to 1, median 1, 99% at most 1"
    assert line == f"test, tokens of the reference answers: {expected}"
    some, none = _split("a", "b"), _split("a")
    some = replace(some, prompts=(some.prompts[0], replace(some.prompts[1], answer=None)))
    none = replace(none, prompts=(replace(none.prompts[0], answer=None),))
    shown = answer_lengths("test", some, tokenizer=CharTokenizer())
    assert shown.endswith("answers: 1 of 1 to 1, median 1, 99% at most 1; 1 prompts have none")
    assert answer_lengths("test", none, tokenizer=CharTokenizer()) == "test: no reference answers"


def test_repetitions_with_one_answer_and_with_several():
    split = _split("a", "b", "a", "c", "b", "a", answers="112131")
    # a: answers 1 2 1, b: 1 and 3, c once
    assert list(repetitions("train", split)) == [
        "train: 2 prompts are repeated with different answers: 1=3=6, 2=5"
    ]
    assert list(repetitions("train", _split("a", "a", "b"))) == [
        "train: 1 prompts are repeated with one answer: 1=2"
    ]
    many = _split(*"abcdefgabcdefg")
    assert next(repetitions("t", many)).endswith("1=8, 2=9, 3=10, 4=11, 5=12 and 2 more")
    assert list(repetitions("train", _split("a", "b"))) == []
