"""Files as people have them: what a run reads from each, and what is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.data.load import load_data
from pipeline.data.references import reference_notices
from pipeline.data.text.tokenizer import Tokenizer
from tests.samples import make_config

CASES = Path(__file__).parent / "cases"
QUESTIONS = [
    "Lena has 3 jars with 4 nuts each. How many nuts?",
    "A bus with 20 people lets 7 off. How many remain?",
    "What is 1,000 plus 200?",
    "Half of 9?",
]
ANSWERS = ["12", "13", "1,200", "4.5"]


def config_of(folder: Path, name: str, **tables: Any) -> Config:
    test = folder / "test.jsonl"
    test.write_text('{"question": "t", "prompt": "t", "answer": "#### 0"}\n')
    tables = {"rollout": {"max_prompt_tokens": 300}, **tables}
    source = {"train": {"path": str(CASES / name)}, "test": {"path": str(test)}}
    return make_config(folder, **tables | {"data": source | tables.get("data", {})})


def turns(*texts: str) -> str:
    """The prompt with these turns of user and model."""
    roles = ("user", "model")
    spoken = [
        f"<start_of_turn>{roles[n % 2]}\n{text}<end_of_turn>\n" for n, text in enumerate(texts)
    ]
    return "".join(spoken) + "<start_of_turn>model\n"


PROMPT = {"prompt": {"template": "{prompt}"}}


@pytest.mark.parametrize(
    ("name", "tables", "before"),
    [
        ("rows.ndjson", {}, ()),
        ("rows.jsonl.gz", {}, ()),
        ("tab.tsv", {}, ()),
        ("pandas_index.csv", {}, ()),
        ("gsm8k.jsonl", {"data": {"answer_pattern": "#### (.+)"}}, ()),
        ("parts_text.jsonl", PROMPT, ()),
        ("system_empty.jsonl", PROMPT, ()),
        ("chat_as_json_text.jsonl", PROMPT, ()),
        ("model_role.jsonl", PROMPT, ("Hello.", "Hi.")),
    ],
)
def test_questions_and_answers_are_read(
    tmp_path: Path, tokenizer: Tokenizer, name: str, tables: dict[str, Any], before: tuple[str, ...]
):
    data = load_data(config_of(tmp_path, name, **tables), tokenizer)
    expected = [(turns(*before, q), a) for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    assert [(p.text, p.answer) for p in data.train.prompts] == expected
    assert all("" not in p.row for p in data.train.prompts)


def test_solutions_are_noticed_with_the_pattern_that_finds_the_answer(
    tmp_path: Path, tokenizer: Tokenizer
):
    config = config_of(tmp_path, "gsm8k.jsonl")
    notice, *_ = reference_notices(config, load_data(config, tokenizer))
    assert "4 of 4 reference answers are solutions" in notice.what
    assert "answer_pattern = '#### (.+)'" in notice.advice
