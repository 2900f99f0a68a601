"""Descriptions of data: lengths and exact tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.data.inspection import split_lines
from pipeline.data.rows import TooLong
from pipeline.data.splits import LoadedSplit
from pipeline.types import Prompt
from tests.samples import CharTokenizer, make_config


def test_the_first_prompt_and_the_lengths():
    lengths = [3] * 2 + [4] + [7] * 10 + [12]
    prompts = [
        Prompt(n, "p", np.array([97] * length, np.int32), "1", {"question": "a" * 50})
        for n, length in enumerate(lengths, start=1)
    ]
    split = LoadedSplit(tuple(prompts), malformed=(), too_long=(TooLong(15, 15),), duplicates=0)
    rollout = make_config(Path(), rollout={"max_prompt_tokens": 12}).rollout
    lengths_line = "15 of 3 to 15, median 7, 99% at most 15; limit 12, 1 above it"
    found = split_lines("test", split, rollout=rollout, tokenizer=CharTokenizer(), width=20)
    assert list(found) == [
        "test, prompt 1: 3 tokens, answer '1'",
        "  question: 'aaa ...",
        "  prompt tokens:",
        "    97=a 97=a 97=a",
        f"test, tokens of the prompts: {lengths_line}",
    ]
