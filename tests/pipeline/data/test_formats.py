"""Datasets of other forms: CSV and JSON files, rows in chat format, no reference answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.data.load import check_rows, load_data
from pipeline.data.rows import Malformed
from pipeline.data.splits import LoadedData
from pipeline.data.text.tokenizer import Tokenizer
from tests.pipeline.data.files import Rows, config_of, write_rows

IN_CHAT = {"template": "{messages}"}
SKIP = {"malformed": "skip"}


def load(tokenizer: Tokenizer, folder: Path, rows: Rows, **tables: Any) -> LoadedData:
    config = config_of(folder, rows, **tables)
    check_rows(config)
    return load_data(config, tokenizer)


def chat(*contents: str, system: str | None = None, **columns: Any) -> dict[str, Any]:
    """A row in chat format whose turns are of user and assistant."""
    turns = [("user", "assistant")[n % 2] for n in range(len(contents))]
    messages = [{"role": who, "content": text} for who, text in zip(turns, contents, strict=True)]
    opening = [{"role": "system", "content": system}] if system else []
    return {"messages": opening + messages, **columns}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_in_chat_format_becomes_turns(tokenizer: Tokenizer, tmp_path: Path, kind: str):
    rows = [chat("a", "b", "c", system="s", level=1), chat("d", "e", level=2)]
    data = load(tokenizer, tmp_path, rows, kind=kind, prompt=IN_CHAT)
    first, second = data.train.prompts
    assert first.text == (
        "<start_of_turn>user\ns\n\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
        "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n"
    )
    assert first.tokens.tolist() == [2, *tokenizer.encode(first.text)]
    assert first.messages is not None
    assert [*first.messages] == rows[0]["messages"]
    assert (first.answer, second.answer) == (None, "e")
    # The last turn of the assistant is the answer, not a part of the prompt.
    assert second.text == "<start_of_turn>user\nd<end_of_turn>\n<start_of_turn>model\n"
    assert second.messages == ({"role": "user", "content": "d"},)
    assert dict(second.row) == rows[1]


def test_an_answer_column_precedes_the_last_turn(tokenizer: Tokenizer, tmp_path: Path):
    rows = [chat("a", "#### b", answer="1"), chat("c", answer="2")]
    data = load(tokenizer, tmp_path, rows, prompt=IN_CHAT)
    assert [p.answer for p in data.train.prompts] == ["1", "2"]
    rows = [chat("a", "x #### b"), chat("c", "d"), chat("e")]
    given = {"answer_pattern": "#### (.+)", "malformed": "skip"}
    test = [chat("t", "#### 1")]
    data = load(tokenizer, tmp_path, rows, test=test, prompt=IN_CHAT, data=given)
    assert [p.answer for p in data.train.prompts] == ["b"]
    reason = "the last turn has no match of the pattern '#### (.+)'"
    assert data.train.malformed == (Malformed(2, reason), Malformed(3, reason))


def one(*turns: tuple[Any, Any]) -> list[dict[str, Any]]:
    return [{"role": who, "content": text} for who, text in turns]


MALFORMED: list[tuple[Any, str]] = [
    ([], "has no message of the user"),
    (one(("assistant", "a")), "has in message 1 the role 'assistant' instead of system or user"),
    (one(("user", "a"), ("user", "b")), "has in message 2 the role 'user' instead of assistant"),
    (one(("user", "a"), ("function_call", "b")), "has in message 2 the role 'function_call';"),
    (one(("user", None)), "has in message 1 no content, not text"),
    (one(("user", "a<end_of_turn>")), "contains the turn token <end_of_turn>"),
    (
        one(("user", [{"type": "text", "text": "a"}, {"type": "image"}])),
        "has in message 1 a part of type 'image'; only text is supported",
    ),
    ("text", "is a value of type str, not a list of messages"),
]


def test_malformed_messages_are_reported(tokenizer: Tokenizer, tmp_path: Path):
    rows = [chat("a"), *({"messages": messages} for messages, _ in MALFORMED), chat("b")]
    data = load(tokenizer, tmp_path, rows, prompt=IN_CHAT, data=SKIP)
    assert [p.id for p in data.train.prompts] == [1, 10]
    for found, (_, reason) in zip(data.train.malformed, MALFORMED, strict=True):
        assert found.reason.startswith(f"column 'messages' {reason}")


def test_other_forms_of_messages_are_read(tokenizer: Tokenizer, tmp_path: Path):
    forms = [
        one(("developer", "s"), ("User", ["q", "r"])),
        [{"role": "user", "parts": [{"text": "p"}]}],
        str([{"role": "user", "content": "q"}]),  # as pandas writes it into CSV
    ]
    data = load(tokenizer, tmp_path, [{"messages": turns} for turns in forms], prompt=IN_CHAT)
    assert [found.text for found in data.train.prompts] == [
        f"<start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n"
        for text in ("s\n\nqr", "p", "q")
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_in_objects_have_dots(tokenizer: Tokenizer, tmp_path: Path, kind: str):
    rows = [{"extra": {"question": f"q{n}"}, "reward_model": {"truth": n}} for n in (1, 2)]
    tables = {
        "data": {"answer_column": "reward_model.truth"},
        "prompt": {"template": "{extra.question}", "turn": "plain"},
        "test": [{"extra.question": "t", "reward_model.truth": 3}],
    }
    data = load(tokenizer, tmp_path, rows, kind=kind, **tables)
    assert [(p.text, p.answer) for p in data.train.prompts] == [("q1", "1"), ("q2", "2")]
    assert dict(data.train.prompts[0].row) == rows[0] | {
        "extra.question": "q1",
        "reward_model.truth": "1",
    }
    assert [(p.text, p.answer) for p in data.test.prompts] == [("t", "3")]


@pytest.mark.parametrize(
    ("row", "tables", "message"),
    [
        (
            chat("a"),
            {"prompt": {**IN_CHAT, "turn": "plain"}},
            r'row 1: column \'messages\' has .* "plain" has none',
        ),
        (chat("a"), {}, "has no column 'question'.*'messages' is in chat format"),
        (
            {"problem": "a", "solution": "b"},
            {},
            r"its columns: \['problem', 'solution'\]; prompt",
        ),
        (
            {"question": "a", "answers": "1"},
            {"data": {"answer_pattern": "(.+)"}},
            "column 'answer'; nearest: 'answers'",
        ),
        (
            {"question": "a", "info": {"answer": "1"}},
            {"data": {"answer_column": "info.anser"}},
            "column 'info.anser'; nearest: 'info.answer'",
        ),
    ],
)
def test_columns_that_settings_name_must_exist(
    tokenizer: Tokenizer, tmp_path: Path, row: Any, tables: Any, message: str
):
    with pytest.raises(ValueError, match=message):
        load(tokenizer, tmp_path, [row], **tables)


def test_demonstrations_in_chat_format_end_with_the_completion(
    tokenizer: Tokenizer, tmp_path: Path
):
    rows = [chat("a", "b", "c", "d"), chat("e", "f"), chat("g")]
    sft = {"train": write_rows(tmp_path / "sft.jsonl", rows), "steps": 1}
    run = {"phases": ["sft", "grpo"]}
    data = load(tokenizer, tmp_path, [chat("x")], data=SKIP, sft=sft, run=run, prompt=IN_CHAT)
    assert data.sft is not None
    first, second = data.sft.demonstrations
    text = tokenizer.decode(first.prompt_tokens)
    assert text == "user\na\nmodel\nb\nuser\nc\nmodel\n"
    assert tokenizer.decode(first.completion_tokens) == "d"
    assert tokenizer.decode(second.completion_tokens) == "f"
    assert data.sft.malformed == (
        Malformed(3, "the last turn is the user's, and there is no column 'completion'"),
    )


def test_a_dataset_may_have_no_reference_answers(tokenizer: Tokenizer, tmp_path: Path):
    rows = [{"question": "a"}, {"question": "b", "label": "x"}]
    data = load(tokenizer, tmp_path, rows)
    assert [p.answer for p in data.train.prompts] == [None, None]
    assert data.train.without_answer == (
        "2 of 2 prompts have no reference answer; name its column with data.answer_column (of "
        "['label', 'question'])"
    )
    assert data.test.without_answer is None
    changed = load(tokenizer, tmp_path, [{**row, "answer": "1"} for row in rows])
    assert changed.fingerprints["train"] != data.fingerprints["train"]
    assert changed.fingerprints["test"] == data.fingerprints["test"]
