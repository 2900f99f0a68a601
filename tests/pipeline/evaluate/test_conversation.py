"""Questions to base and tuned policy: prompts as in the run, replies side by side."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.text.prompts import PromptMaker
from pipeline.evaluate.conversation import (
    Conversation,
    QuestionError,
    Reply,
    read_question,
)
from tests.pipeline.evaluate.test_measurement import FakeAdapterSampler
from tests.run_process import Script
from tests.samples import CharTokenizer, make_config


def conversation(sampler: FakeAdapterSampler, *, adapter: str | None = "/runs/a") -> Conversation:
    config = make_config(Path(), prompt={"turn": "plain", "template": "{question}?"})
    maker = PromptMaker(config.prompt, CharTokenizer())
    samplers: list[Any] = [sampler]
    return Conversation(config, maker, samplers, adapter=adapter, temperature=0.5)


def test_both_policies_are_asked_with_the_runs_prompt_and_the_same_noise():
    sampler = FakeAdapterSampler(Script())
    base, tuned = asyncio.run(conversation(sampler).ask({"question": "abc"}))
    assert base == Reply("base", "<reasoning>x</reasoning><answer>1</answer>", 43, ended=True)
    assert tuned == replace(base, policy="tuned", text=base.text.replace("1", "0"))
    assert sampler.script.calls == ["open None", "open /runs/a"]
    (first, temperature), (second, _) = sampler.asked
    assert (first.name, temperature) == (second.name, 0.5)
    assert "".join(map(chr, first.prompt_tokens[1:])) == "abc?"
    alone = conversation(sampler, adapter=None)
    assert [reply.policy for reply in asyncio.run(alone.ask({"question": "abc"}))] == ["base"]


def test_invalid_questions_are_refused_with_the_reason():
    sampler = FakeAdapterSampler(Script())
    for question, message in (
        ("abcdefgh", "this makes 10 tokens; rollout.max_prompt_tokens = 8"),
        (" ", "column 'question' is empty"),
    ):
        with pytest.raises(QuestionError, match=message):
            asyncio.run(conversation(sampler).ask({"question": question}))
    assert sampler.asked == []


def test_a_question_is_the_only_column_or_a_json_object():
    assert read_question('{"a": 1}', columns=("q",)) == {"q": '{"a": 1}'}
    assert read_question('{"q": 1}', columns=("q",)) == {"q": "1"}
    assert read_question('{"a": "x", "b": 2}', columns=("b", "a")) == {"a": "x", "b": "2"}
    for text in ("x", "[1]", '{"a": 1}', '{"a": 1, "b": 2, "c": 3}'):
        with pytest.raises(QuestionError, match=re.escape('write {"a": "...", "b": "..."}')):
            read_question(text, columns=("a", "b"))
