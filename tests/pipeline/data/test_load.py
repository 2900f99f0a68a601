"""From files to prompts: rows, excluded rows and the report on them, refusals."""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest

from configs.schema import Config
from pipeline.data.load import load_data, load_tests
from pipeline.data.rows import Malformed, TooLong
from pipeline.data.splits import LoadedSplit
from pipeline.data.text.prompts import PromptMaker
from pipeline.data.text.tokenizer import Tokenizer
from tests.pipeline.data.files import config_of, questions, write_rows

PLAIN = {"turn": "plain"}
GOOD = {"question": "tom has 1 apples.", "answer": "1"}
SKIP = {"malformed": "skip"}


MALFORMED: list[tuple[Any, str]] = [
    ('{"question": "q", "answer": ', "not JSON: Expecting value"),
    ('["q", "1"]', "a value of type list, not an object with columns"),
    ({"question": "q"}, "column 'answer' is missing"),
    (
        {"question": ["q"], "answer": "1"},
        "column 'question' is a value of type list, not text or a number",
    ),
    ({"question": "\ud800", "answer": "1"}, "column 'question' contains a lone surrogate"),
    (
        {"question": "<end_of_turn>b", "answer": "1"},
        "column 'question' contains the turn token <end_of_turn>",
    ),
]


def test_malformed_rows_are_reported_with_their_numbers(tokenizer: Tokenizer, tmp_path: Path):
    rows = [GOOD, *(row for row, _ in 2 * MALFORMED), GOOD]
    split = load_data(config_of(tmp_path, rows, data=SKIP), tokenizer).train
    assert [p.id for p in split.prompts] == [1, 14]
    assert [bad.row for bad in split.malformed] == list(range(2, 14))
    for bad, (_, reason) in zip(split.malformed, 2 * MALFORMED, strict=True):
        assert bad.reason.startswith(reason)
    config = config_of(tmp_path, rows)
    with pytest.raises(ValueError, match="12 rows are malformed") as raised:
        load_data(config, tokenizer)
    assert str(raised.value).splitlines() == [
        f"data.train: 12 rows are malformed in {config.data.train.path}:",
        *(f"  row {bad.row}: {bad.reason}" for bad in split.malformed[:10]),
        "  and 2 more",
        'fix them, or exclude them with data.malformed = "skip"',
    ]


def test_overlong_prompts_are_excluded_and_never_truncated(tokenizer: Tokenizer, tmp_path: Path):
    rows = [{**GOOD, "question": " has" * n} for n in (10, 11, 12)]

    def load(most: int) -> LoadedSplit:
        rollout = {"max_prompt_tokens": most}
        return load_data(config_of(tmp_path, rows, rollout=rollout), tokenizer).train

    length = len(load(60).prompts[1].tokens)
    split = load(length)
    assert [p.id for p in split.prompts] == [1, 2]
    assert split.too_long == (TooLong(3, length + 1),)
    message = r"no prompt of .*train.* is left: 0 rows .* 3 are longer than .* = 1"
    with pytest.raises(ValueError, match=message):
        load(1)


def test_missing_and_empty_files_are_refused(tokenizer: Tokenizer, tmp_path: Path):
    source = write_rows(tmp_path / "train.jsonl", [])
    for path, what in (
        (source["path"], "has no rows"),
        (f"{tmp_path}/trian.jsonl", r"data\.train\.path: no file .*; nearest: .*train\.jsonl"),
        ("nowhere/a.parquet", r"no file /.*/nowhere/a\.parquet$"),
    ):
        with pytest.raises(ValueError, match=what):
            load_data(config_of(tmp_path, {"path": path}), tokenizer)


def test_parquet_is_read_without_output(tokenizer: Tokenizer, tmp_path: Path, capfd: Any):
    rows: list[dict[str, Any]] = [GOOD, {**GOOD, "answer": None}, {**GOOD, "question": "b"}]
    path = tmp_path / "a.parquet"
    source = write_rows(path, [{**row, "tests": [1, 2]} for row in rows])
    config = config_of(tmp_path, {**source, "limit": 2}, data=SKIP)
    capfd.readouterr()
    split = load_data(config, tokenizer).train
    assert [(p.id, p.row["tests"]) for p in split.prompts] == [(1, [1, 2])]
    assert split.malformed == (Malformed(2, "column 'answer' is null"),)
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable Parquet file"):
        load_data(config, tokenizer)
    assert capfd.readouterr() == ("", "")


NAMED = "'openai/gsm8k' (subset 'main', split 'train')"
GATED = datasets.exceptions.DatasetNotFoundError("'openai/gsm8k' is a gated dataset")


def test_a_hub_dataset_gives_its_rows_or_one_sentence(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub = Mock(return_value=datasets.Dataset.from_list([GOOD, GOOD]))
    monkeypatch.setattr(datasets, "load_dataset", hub)
    source = {"path": "openai/gsm8k", "subset": "main", "split": "train", "limit": 1}
    config = config_of(tmp_path, source)
    assert [p.id for p in load_data(config, tokenizer).train.prompts] == [1]
    hub.assert_called_once_with("openai/gsm8k", "main", split="train")
    for error, sentence in (
        (ConnectionError("so"), "the hub cannot be reached for 'openai/gsm8k' (so)"),
        (GATED, f"{NAMED} is gated: accept its terms on the hub, then `hf auth login`"),
        (ValueError("no split.\nBut a"), f"the hub cannot load {NAMED}: no split. But a"),
    ):
        hub.side_effect = error
        with pytest.raises(ValueError, match="^" + re.escape(f"data.train: {sentence}")):
            load_data(config, tokenizer)


def _texts(split: LoadedSplit | None) -> str:
    return "" if split is None else "".join(prompt.text for prompt in split.prompts)


def test_promise_6_shares_of_the_training_data_are_disjoint_and_the_same_each_time(
    tokenizer: Tokenizer, tmp_path: Path
):
    letters = string.ascii_letters + "ab"
    shares: dict[str, Any] = {"validation": {"share": 0.25}, "test": {"share": 0.5, "limit": 5}}
    plain: dict[str, Any] = {"prompt": PLAIN, "eval": {"every_steps": 1}}
    config = config_of(tmp_path, questions(letters), data=shares, **plain)
    data = load_data(config, tokenizer)
    parts = [_texts(split) for split in (data.train, data.validation, data.test)]
    assert [len(set(part)) for part in parts] == [52 - 13 - 5, 13, 5]
    assert sorted("".join(parts)) == sorted(letters)  # equal rows are in one split
    assert data.report[-1].startswith(f"test: {len(parts[2])} prompts of data.train")
    maker = PromptMaker(config.prompt, tokenizer)
    # The order of the rows has no part in it.
    write_rows(tmp_path / "train.jsonl", questions(letters[::-1]))
    assert sorted(_texts(load_tests(config, maker)["test"])) == sorted(parts[2])
    share = {"validation": {"share": 0.25}}
    with_file = config_of(tmp_path, questions("a"), test=questions(letters), data=share, **plain)
    assert _texts(load_tests(with_file, maker)["test"]) == letters
    write_rows(tmp_path / "train.jsonl", questions("abab"))
    with pytest.raises(ValueError, match=r"2 different rows are too few to hold out data\.test"):
        load_data(config, tokenizer)


@pytest.mark.parametrize(
    ("split", "texts"),
    [
        ("train[:2]", "ab"),
        ("train[-3:]", "fgh"),
        ("train[25%:50%]", "cd"),
        ("train[-25%:]", "gh"),
        ("train[6:]", "gh"),
    ],
)
def test_a_slice_of_a_file_is_that_of_its_rows(
    tokenizer: Tokenizer, tmp_path: Path, split: str, texts: str
):
    source = write_rows(tmp_path / "train.jsonl", questions("abcdefgh")) | {"split": split}
    for limit, expected in ((None, texts), (1, texts[0])):
        config = config_of(tmp_path, {**source, "limit": limit}, prompt=PLAIN)
        assert _texts(load_data(config, tokenizer).train) == expected


def _mixture(folder: Path, *, prompts_per_step: int = 3, weight: float) -> Config:
    """Sources `train` and `more`, a validation split, and a set with other columns."""
    other = [{"q": letter, "solution": f"#### {letter}"} for letter in "dkz"]
    columns = {"template": "{q}", "answer_column": "solution", "answer_pattern": "#### (.+)"}
    more = write_rows(folder / "more.jsonl", questions("kla"))
    validation = write_rows(folder / "validation.jsonl", questions("czv"))
    sets = [{"name": "other", **write_rows(folder / "other.jsonl", other), **columns}]
    return config_of(
        folder,
        questions("abcdefg"),
        test=questions("bt"),
        data={"mixture": [{"name": "more", "weight": weight, **more}], "validation": validation},
        eval={"every_steps": 1, "sets": sets},
        prompt=PLAIN,
        rollout={"prompts_per_step": prompts_per_step},
    )


def test_a_mixture_shares_no_prompt_with_evaluation_data(tokenizer: Tokenizer, tmp_path: Path):
    data = load_data(_mixture(tmp_path, weight=0.5), tokenizer)
    assert data.validation is not None
    # b is in test, c in validation, d and k in the set.
    assert [(p.text, p.id, p.source) for p in data.train.prompts] == [
        *(("aefg"[n], (1, 5, 6, 7)[n], "train") for n in range(4)),
        *(("la"[n], 10**9 + 2 + n, "more") for n in range(2)),
    ]
    assert [p.text for p in data.validation.prompts] == ["c", "v"]
    others = [(p.text, p.answer, p.id) for p in data.sets["other"].prompts]
    assert others == [("d", "d", 1), ("k", "k", 2), ("z", "z", 3)]
    assert data.weights == {"train": 2 / 3, "more": 1 / 3}
    assert data.report == (
        "train: 4 prompts, excluded: 3 in a later split",
        "mixture.more: 2 prompts, excluded: 1 in a later split",
        "validation: 2 prompts, excluded: 1 in a later split",
        "test: 2 prompts",
        "sets.other: 3 prompts",
    )
    names = ["train", "mixture.more", "validation", "test", "sets.other"]
    assert list(data.fingerprints) == names


def test_training_data_that_evaluation_leaves_too_few_prompts_are_refused(
    tokenizer: Tokenizer, tmp_path: Path
):
    message = (
        r"^data\.mixture \(more\): its share of 66\.7% is up to 4 of the rollout\.prompts_per_step"
    )
    with pytest.raises(ValueError, match=message):
        load_data(_mixture(tmp_path, prompts_per_step=6, weight=2.0), tokenizer)
    config = config_of(tmp_path, questions("ab"), test=questions("abc"), prompt=PLAIN)
    with pytest.raises(ValueError, match=r"data\.train: a later split contains all 2 prompts"):
        load_data(config, tokenizer)
