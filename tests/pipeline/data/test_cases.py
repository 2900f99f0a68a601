"""Files as people have them: what a run reads from each, or why it refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from launch import data as launch_data
from pipeline.data.load import load_data
from pipeline.data.references import reference_notices
from pipeline.data.rows import DataError
from pipeline.data.splits import LoadedData
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.tokenizer_files import read_tokenizer
from tests.demo_texts import write_tokenizer
from tests.samples import make_config

CASES = Path(__file__).parent / "cases"
QUESTIONS = [
    "Lena has 3 jars with 4 nuts each. How many nuts?",
    "A bus with 20 people lets 7 off. How many remain?",
    "What is 1,000 plus 200?",
    "Half of 9?",
]
ANSWERS = ["12", "13", "1,200", "4.5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return read_tokenizer(folder)


def config_of(folder: Path, name: str, **tables: Any) -> Config:
    test = folder / "test.jsonl"
    test.write_text('{"question": "t", "prompt": "t", "conversations": "t", "answer": "#### 0"}\n')
    tables = {"rollout": {"max_prompt_tokens": 300}, "model": {"path": str(folder)}, **tables}
    source = {"train": {"path": str(CASES / name)}, "test": {"path": str(test)}}
    return make_config(folder, **tables | {"data": source | tables.get("data", {})})


def load(folder: Path, tokenizer: Tokenizer, name: str, **tables: Any) -> LoadedData:
    return load_data(config_of(folder, name, **tables), tokenizer)


def turns(*texts: str) -> str:
    """The prompt with these turns of user and model."""
    roles = ("user", "model")
    spoken = [
        f"<start_of_turn>{roles[n % 2]}\n{text}<end_of_turn>\n" for n, text in enumerate(texts)
    ]
    return "".join(spoken) + "<start_of_turn>model\n"


PROMPT = {"prompt": {"template": "{prompt}"}}
CONVERSATIONS = {"prompt": {"template": "{conversations}"}}


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
    folder: Path, tokenizer: Tokenizer, name: str, tables: dict[str, Any], before: tuple[str, ...]
):
    data = load(folder, tokenizer, name, **tables)
    expected = [(turns(*before, q), a) for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    assert [(p.text, p.answer) for p in data.train.prompts] == expected
    assert all("" not in p.row for p in data.train.prompts)


def test_share_gpt_has_the_answer_in_its_last_turn(folder: Path, tokenizer: Tokenizer):
    data = load(folder, tokenizer, "sharegpt.jsonl", **CONVERSATIONS)
    expected = [(turns(f"Be brief.\n\n{q}"), a) for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    assert [(p.text, p.answer) for p in data.train.prompts] == expected


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("float_small.jsonl", ["0.1", "0.00001", "10", "10000000000000000"]),
        ("float32_answer.parquet", ["0.1", "0.00001", "10.0", "10000000000000000"]),
        ("decimal_answer.parquet", ["0.10000", "0.00001", "10.00000", f"1{16 * '0'}.00000"]),
    ],
)
def test_numbers_are_written_as_they_were_given(
    folder: Path, tokenizer: Tokenizer, name: str, answers: list[str]
):
    assert [p.answer for p in load(folder, tokenizer, name).train.prompts] == answers


def test_solutions_are_noticed_with_the_pattern_that_finds_the_answer(
    folder: Path, tokenizer: Tokenizer
):
    config = config_of(folder, "gsm8k.jsonl")
    notice, *_ = reference_notices(config, load_data(config, tokenizer))
    assert "4 of 4 reference answers are solutions" in notice.what
    assert "answer_pattern = '#### (.+)'" in notice.advice


NOT_UTF_8 = [f"row {n}: not UTF-8" for n in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    "case",
    [
        ("tool.jsonl", PROMPT, ["row 1: column 'prompt' has in message 2 tool calls; tools are"]),
        ("semicolon.csv", {}, ["semicolon.csv: the separator is ';' instead of ','"]),
        ("latin1.jsonl", {}, NOT_UTF_8),
        (
            "mathplain.jsonl",
            {"prompt": {"turn": "plain"}},
            ["row 4: column 'question' contains <bos>, with which every prompt begins already"],
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: tuple[str, dict[str, Any], list[str]],
):
    name, tables, words = case
    config = config_of(folder, name, **tables)
    with pytest.raises(DataError) as refused:
        load_data(config, read_tokenizer(folder))
    # launch.data says the same; it may be given a run folder.
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert launch_data.main([str(tmp_path)]) == 2
    for message in (str(refused.value), capsys.readouterr().err):
        assert [word for word in words if word not in message] == []
