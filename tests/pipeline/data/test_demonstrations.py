"""Demonstrations: tokens, excluded rows and the report on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.data.demonstrations import LoadedDemonstrations
from pipeline.data.load import load_data
from pipeline.data.rows import Malformed
from pipeline.data.splits import report_lines
from pipeline.data.text.tokenizer import Tokenizer
from tests.samples import make_config

WORKED = {"question": "tom has 1 apples.", "completion": "<answer>1</answer>"}


def _write(path: Path, rows: list[Any]) -> dict[str, str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"path": str(path)}


def _config(folder: Path, examples: list[Any], **tables: Any) -> Config:
    def split(*questions: str) -> dict[str, str]:
        rows = [{"question": question, "answer": "1"} for question in questions]
        return _write(folder / f"{questions[0]}.jsonl", rows)

    given = {
        "run": {"phases": ["sft", "grpo"]},
        "sft": {"steps": 1},
        "rollout": {"max_prompt_tokens": 60},
        "eval": {"every_steps": 1, "sets": [{"name": "more", **split("more")}]},
        "data": {"train": split("a", "b"), "validation": split("c"), "test": split("d")},
    }
    tables = {name: given.get(name, {}) | tables.get(name, {}) for name in given | tables}
    tables["sft"] = {"train": _write(folder / "sft.jsonl", examples), **tables["sft"]}
    return make_config(folder, **tables)


def _load(
    folder: Path, tokenizer: Tokenizer, rows: list[Any], **tables: Any
) -> LoadedDemonstrations:
    loaded = load_data(_config(folder, rows, **tables), tokenizer).sft
    assert loaded is not None
    return loaded


def test_a_demonstration_is_a_prompt_and_a_completion_with_its_stop_token(
    tokenizer: Tokenizer, tmp_path: Path
):
    loaded = _load(tmp_path, tokenizer, [WORKED])
    (example,) = loaded.demonstrations
    prompt = "<start_of_turn>user\ntom has 1 apples.<end_of_turn>\n<start_of_turn>model\n"
    end = tokenizer.piece_id("<end_of_turn>")
    assert example.id == 1
    assert example.prompt_tokens.tolist() == [2, *tokenizer.encode(prompt)]
    assert example.completion_tokens.tolist() == [*tokenizer.encode("<answer>1</answer>"), end]
    assert example.prompt_tokens.dtype == example.completion_tokens.dtype == "int32"
    assert len(example) == len(example.prompt_tokens) + len(example.completion_tokens)


def test_after_a_plain_prompt_a_completion_ends_with_eos(tokenizer: Tokenizer, tmp_path: Path):
    (example,) = _load(tmp_path, tokenizer, [WORKED], prompt={"turn": "plain"}).demonstrations
    assert example.prompt_tokens.tolist() == [2, *tokenizer.encode("tom has 1 apples.")]
    assert example.completion_tokens[-1] == tokenizer.eos_id


def test_unusable_rows_are_reported(tokenizer: Tokenizer, tmp_path: Path):
    rows = [
        WORKED,
        {"question": "q"},
        {**WORKED, "completion": "a<end_of_turn>b"},
        {**WORKED, "completion": "<start_of_turn>"},
        {**WORKED, "question": "<end_of_turn>"},
        {**WORKED, "completion": "x" * 200},
        {**WORKED, "question": "c"},
        {**WORKED, "question": "d"},
        {**WORKED, "question": "more"},
        WORKED,
    ]
    data = {"malformed": "skip"}
    loaded = _load(tmp_path, tokenizer, rows, data=data)
    assert [example.id for example in loaded.demonstrations] == [1, 10]
    assert loaded.malformed == (
        Malformed(2, "column 'completion' is missing"),
        Malformed(3, "column 'completion' contains the stop token <end_of_turn>"),
        Malformed(4, "column 'completion' contains the forbidden token <start_of_turn>"),
        Malformed(5, "column 'question' contains the turn token <end_of_turn>"),
    )
    assert (len(loaded.too_long), loaded.overlaps, loaded.duplicates) == (1, 3, 1)
    assert (loaded.too_long[0].row, loaded.too_long[0].tokens > 200) == (6, True)
    excluded = "excluded: 4 malformed, 1 too long, 3 in a later split, duplicates kept: 1"
    assert next(report_lines("sft: 2", loaded)) == f"sft: 2, {excluded}"
    with pytest.raises(ValueError, match=r"sft\.train: 4 rows are malformed in .*sft\.jsonl"):
        _load(tmp_path, tokenizer, rows)


def test_the_answer_prefix_belongs_to_the_prompt(tokenizer: Tokenizer, tmp_path: Path):
    rows = [
        {"question": "a", "completion": "<reasoning>1</reasoning><answer>1</answer>"},
        WORKED,
        {"question": "tom", "completion": "<reasoning>"},
    ]
    prefixed = {"prompt": {"answer_prefix": "<reasoning>"}, "data": {"malformed": "skip"}}
    loaded = load_data(_config(tmp_path, rows, **prefixed), tokenizer)
    assert loaded.sft is not None
    first, last = loaded.sft.demonstrations
    prompt = loaded.train.prompts[0]
    assert prompt.tokens.tolist() == [
        2,
        *tokenizer.encode("<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n"),
        *tokenizer.encode("<reasoning>"),
    ]
    assert first.prompt_tokens.tolist() == prompt.tokens.tolist()
    end = tokenizer.piece_id("<end_of_turn>")
    rest = tokenizer.encode("1</reasoning><answer>1</answer>")
    assert first.completion_tokens.tolist() == [*rest, end]
    assert last.completion_tokens.tolist() == [end]
    what = "column 'completion' does not begin with prompt.answer_prefix = '<reasoning>'"
    assert loaded.sft.malformed == (Malformed(2, what),)
