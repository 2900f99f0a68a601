"""Demonstrations: tokens, excluded rows and the report on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.data.demonstrations import LoadedDemonstrations
from pipeline.data.load import load_data
from pipeline.data.rows import Malformed
from pipeline.data.splits import report_lines
from pipeline.data.text.tokenizer import Tokenizer
from tests.pipeline.data.files import Rows, config_of, questions, write_rows

WORKED = {"question": "tom has 1 apples.", "completion": "<answer>1</answer>"}


def _load(folder: Path, tokenizer: Tokenizer, rows: Rows, **tables: Any) -> LoadedDemonstrations:
    """Those of a run with prompts a and b, c for validation, d for the test, and e in a set."""
    validation, more = (
        write_rows(folder / f"{text}.jsonl", questions(text)) for text in ("c", "e")
    )
    config = config_of(
        folder,
        questions("ab"),
        test=questions("d"),
        run={"phases": ["sft", "grpo"]},
        sft={"steps": 1, "train": write_rows(folder / "sft.jsonl", rows)},
        eval={"every_steps": 1, "sets": [{"name": "more", **more}]},
        data={"validation": validation} | tables.pop("data", {}),
        rollout={"max_prompt_tokens": 60},
        **tables,
    )
    loaded = load_data(config, tokenizer).sft
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
        {**WORKED, "question": "e"},
        WORKED,
    ]
    loaded = _load(tmp_path, tokenizer, rows, data={"malformed": "skip"})
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
    loaded = _load(
        tmp_path,
        tokenizer,
        rows,
        prompt={"answer_prefix": "<reasoning>"},
        data={"malformed": "skip"},
    )
    first, last = loaded.demonstrations
    assert first.prompt_tokens.tolist() == [
        2,
        *tokenizer.encode("<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n"),
        *tokenizer.encode("<reasoning>"),
    ]
    end = tokenizer.piece_id("<end_of_turn>")
    rest = tokenizer.encode("1</reasoning><answer>1</answer>")
    assert first.completion_tokens.tolist() == [*rest, end]
    assert last.completion_tokens.tolist() == [end]
    what = "column 'completion' does not begin with prompt.answer_prefix = '<reasoning>'"
    assert loaded.malformed == (Malformed(2, what),)
