"""Questions to base and tuned policy: prompts as in the run, replies side by side."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.text.prompts import PromptMaker
from pipeline.evaluate.conversation import (
    Conversation,
    QuestionError,
    Reply,
    read_question,
    side_by_side,
)
from pipeline.types import Completion, RolloutRequest
from tests.pipeline.evaluate.test_measurement import FakeAdapterSampler
from tests.run_process import Script
from tests.samples import CharTokenizer, completion, make_config


class Echo(FakeAdapterSampler):
    """Replies with the reversed prompt; the tuned policy's reply is truncated."""

    def __init__(self) -> None:
        super().__init__(Script())
        self.asked: list[tuple[RolloutRequest, float]] = []

    async def generate(
        self, requests: Sequence[RolloutRequest], *, temperature: float, **_: Any
    ) -> list[Completion]:
        self.asked += [(request, temperature) for request in requests]
        return [
            completion(
                request,
                "".join(chr(token) for token in request.prompt_tokens[:0:-1]),
                ended=self.version == 0,
                version=self.version,
                adapter_sha256=self.adapter,
            )
            for request in requests
        ]


def conversation(
    folder: Path, sampler: Echo, *, adapter: str | None = "/runs/a", **prompt: Any
) -> Conversation:
    config = make_config(folder, prompt={"turn": "plain", **prompt})
    maker = PromptMaker(config.prompt, CharTokenizer())
    samplers: list[Any] = [sampler]
    return Conversation(config, maker, samplers, adapter=adapter, temperature=0.5)


def test_both_policies_are_asked_with_the_runs_prompt_and_the_same_noise(tmp_path: Path):
    sampler = Echo()
    asked = conversation(tmp_path, sampler, template="{question}?")
    base, tuned = asyncio.run(asked.ask({"question": "abc"}))
    assert base == Reply("base", "?cba", 5, ended=True)
    assert tuned == Reply("tuned", "?cba", 4, ended=False)
    assert (base.note, tuned.note) == ("(5 tokens)", "(4 tokens, cut off)")
    assert sampler.script.calls == ["open None", "open /runs/a"]
    (first, temperature), (second, _) = sampler.asked
    assert (first.name, temperature) == (second.name, 0.5)
    alone = conversation(tmp_path, sampler, adapter=None, template="{question}?")
    assert [reply.policy for reply in asyncio.run(alone.ask({"question": "abc"}))] == ["base"]


def test_invalid_questions_are_refused_with_the_reason(tmp_path: Path):
    sampler = Echo()
    for question, message in (
        ("abcdefgh", "this makes 9 tokens; rollout.max_prompt_tokens = 8"),
        (" ", "column 'question' is empty"),
    ):
        with pytest.raises(QuestionError, match=message):
            asyncio.run(conversation(tmp_path, sampler).ask({"question": question}))
    assert sampler.asked == []


def test_a_question_is_the_only_column_or_a_json_object():
    assert read_question('{"a": 1}', columns=("q",)) == {"q": '{"a": 1}'}
    assert read_question('{"q": 1}', columns=("q",)) == {"q": "1"}
    assert read_question('{"a": "x", "b": 2}', columns=("b", "a")) == {"a": "x", "b": "2"}
    for text in ("x", "[1]", '{"a": 1}', '{"a": 1, "b": 2, "c": 3}'):
        with pytest.raises(QuestionError, match=re.escape('write {"a": "...", "b": "..."}')):
            read_question(text, columns=("a", "b"))


def test_replies_are_shown_in_columns():
    left = Reply("base", "one two three\n\nfour", 4, ended=True)
    right = Reply("tuned", "a\tb \x1b[31m", 3, ended=False)
    assert list(side_by_side([left, right], width=23)) == [
        "base       | tuned",
        "---------- | ----------",
        "one two    | a   b",
        "three      | \ufffd[31m",
        "           | (3 tokens,",
        "four       | cut off)",
        "(4 tokens) |",
    ]
