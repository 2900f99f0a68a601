"""Files as people have them: what a run reads from each, and what is noticed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.load import load_data
from pipeline.data.references import reference_notices
from pipeline.data.text.tokenizer import Tokenizer
from tests.pipeline.data.files import config_of

CASES = Path(__file__).parent / "cases"
WORDS = [
    ("Lena has 3 jars with 4 nuts each. How many nuts?", "12"),
    ("A bus with 20 people lets 7 off. How many remain?", "13"),
    ("What is 1,000 plus 200?", "1,200"),
    ("Half of 9?", "4.5"),
]
NUMBERS = [
    ("What is a tenth?", "0.1"),
    ("What is a hundred-thousandth?", "0.00001"),
    ("What is two times five?", "10"),
    ("What is 10 to the 16th?", "10000000000000000"),
]
FLOATS = [(question, f"{answer}.0" if len(answer) == 2 else answer) for question, answer in NUMBERS]
DECIMALS = [
    (q, a)
    for (q, _), a in zip(
        NUMBERS, ("0.10000", "0.00001", "10.00000", f"{10**16}.00000"), strict=True
    )
]


def source(name: str) -> dict[str, str]:
    return {"path": str(CASES / name)}


def turns(*texts: str) -> str:
    """The prompt with these turns of user and model."""
    roles = ("user", "model")
    spoken = [
        f"<start_of_turn>{roles[n % 2]}\n{text}<end_of_turn>\n" for n, text in enumerate(texts)
    ]
    return "".join(spoken) + "<start_of_turn>model\n"


PROMPT = {"prompt": {"template": "{prompt}"}}
CHATS = {"prompt": {"template": "{conversations}"}}


@pytest.mark.parametrize(
    ("name", "tables", "rows", "before"),
    [
        ("rows.ndjson", {}, WORDS, ()),
        ("rows.jsonl.gz", {}, WORDS, ()),
        ("tab.tsv", {}, WORDS, ()),
        ("pandas_index.csv", {}, WORDS, ()),
        ("gsm8k.jsonl", {"data": {"answer_pattern": "#### (.+)"}}, WORDS, ()),
        ("float_small.jsonl", {}, NUMBERS, ()),
        ("float32_answer.parquet", {}, FLOATS, ()),
        ("decimal_answer.parquet", {}, DECIMALS, ()),
        ("parts_text.jsonl", PROMPT, WORDS, ()),
        ("system_empty.jsonl", PROMPT, WORDS, ()),
        ("chat_as_json_text.jsonl", PROMPT, WORDS, ()),
        ("model_role.jsonl", PROMPT, WORDS, ("Hello.", "Hi.")),
        ("sharegpt.jsonl", CHATS, [("Be brief.\n\n" + q, a) for q, a in WORDS], ()),
    ],
)
def test_questions_and_answers_are_read(
    tmp_path: Path,
    tokenizer: Tokenizer,
    name: str,
    tables: dict[str, Any],
    rows: list[tuple[str, str]],
    before: tuple[str, ...],
):
    data = load_data(config_of(tmp_path, source(name), **tables), tokenizer)
    expected = [(turns(*before, q), a) for q, a in rows]
    assert [(p.text, p.answer) for p in data.train.prompts] == expected
    assert all("" not in p.row for p in data.train.prompts)


@pytest.mark.parametrize(
    ("name", "tables", "what"),
    [
        ("latin1.jsonl", {}, "row 4: not UTF-8"),
        ("semicolon.csv", {}, "semicolon.csv: the separator is ';' instead of ','"),
        ("tool.jsonl", PROMPT, "row 1: column 'prompt' has in message 2 tool calls; tools are not"),
        ("mathplain.jsonl", {"prompt": {"turn": "plain"}}, "column 'question' contains <bos>"),
        ("sharegpt.jsonl", PROMPT, 'set prompt.template = "{conversations}"'),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(
    tmp_path: Path, tokenizer: Tokenizer, name: str, tables: dict[str, Any], what: str
):
    with pytest.raises(ValueError, match=re.escape(what)):
        load_data(config_of(tmp_path, source(name), **tables), tokenizer)


def test_solutions_are_noticed_with_the_pattern_that_finds_the_answer(
    tmp_path: Path, tokenizer: Tokenizer
):
    config = config_of(tmp_path, source("gsm8k.jsonl"))
    notice, *_ = reference_notices(config, load_data(config, tokenizer))
    assert "4 of 4 reference answers are solutions" in notice.what
    assert "answer_pattern = '#### (.+)'" in notice.advice
