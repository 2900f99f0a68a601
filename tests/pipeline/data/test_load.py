"""From files to prompts: rows, excluded rows and the report on them, refusals."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest

from configs.schema import Config
from pipeline.data.load import load_data, load_split, load_tests
from pipeline.data.rows import Malformed, TooLong
from pipeline.data.splits import LoadedSplit
from pipeline.data.text.prompts import PromptMaker
from pipeline.data.text.tokenizer import Tokenizer
from tests.samples import make_config

PLAIN = {"turn": "plain"}
GOOD = {"question": "tom has 1 apples.", "answer": "1"}


def _write(path: Path, rows: list[Any]) -> str:
    """A JSONL file of `rows`; strings are written as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def _config(
    train: Mapping[str, Any], *, max_prompt_tokens: int = 60, prompt: Any = None, **data: Any
) -> Config:
    lengths = {"max_prompt_tokens": max_prompt_tokens, "max_new_tokens": 8}
    return make_config(
        Path("runs"),
        data={"train": train, "test": train, **data},
        prompt=prompt or {},
        rollout={"prompts_per_step": 1, **lengths},
        eval={"every_steps": 1 if "validation" in data else 0},
    )


def _load(path: str, tokenizer: Tokenizer, *, limit: Any = None, **kwargs: Any) -> LoadedSplit:
    source = {"path": path} | ({} if limit is None else {"limit": limit})
    return _load_train(_config(source, **kwargs), tokenizer)


def _load_train(config: Config, tokenizer: Tokenizer) -> LoadedSplit:
    maker = PromptMaker(config.prompt, tokenizer)
    return load_split("train", config.data.train, config=config, maker=maker)


BROKEN: list[tuple[Any, str]] = [
    ('{"question": "q", "answer": ', "not JSON: Expecting value"),
    ('["q", "1"]', "a value of type list, not an object with columns"),
    ({"question": "q"}, "column 'answer' is missing"),
    (
        {"question": ["q"], "answer": "1"},
        "column 'question' is a value of type list, not text or a number",
    ),
    ({"question": "\ud800", "answer": "1"}, "column 'question' contains a lone surrogate"),
    ({"question": "<end_of_turn>b", "answer": "1"}, "contains the turn token <end_of_turn>"),
]


@pytest.mark.parametrize(("row", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_a_malformed_row_is_reported_with_its_number(
    tokenizer: Tokenizer, tmp_path: Path, row: Any, reason: str
):
    path = _write(tmp_path / "a.jsonl", [GOOD, row, GOOD])
    split = _load(path, tokenizer, malformed="skip")
    assert [p.id for p in split.prompts] == [1, 3]
    assert [bad.row for bad in split.malformed] == [2]
    assert reason in split.malformed[0].reason
    with pytest.raises(ValueError, match=r"data\.train: 1 row is malformed") as raised:
        _load(path, tokenizer)
    assert f"  row 2: {split.malformed[0].reason}" in str(raised.value).splitlines()


def test_the_refusal_lists_ten_rows_and_the_count(tokenizer: Tokenizer, tmp_path: Path):
    path = _write(tmp_path / "a.jsonl", [GOOD, *[{"question": "q"}] * 12])
    with pytest.raises(ValueError, match="12 rows are malformed") as raised:
        _load(path, tokenizer)
    lines = str(raised.value).splitlines()
    assert lines[0] == f"data.train: 12 rows are malformed in {path}:"
    assert lines[1] == "  row 2: column 'answer' is missing"
    assert lines[11:] == [
        "  and 2 more",
        'fix them, or exclude them with data.malformed = "skip"',
    ]


def test_overlong_prompts_are_excluded_and_never_truncated(tokenizer: Tokenizer, tmp_path: Path):
    rows = [{**GOOD, "question": " has" * n} for n in (10, 11, 12)]
    path = _write(tmp_path / "a.jsonl", rows)
    length = len(_load(path, tokenizer).prompts[1].tokens)
    split = _load(path, tokenizer, max_prompt_tokens=length)
    assert [p.id for p in split.prompts] == [1, 2]
    assert split.too_long == (TooLong(3, length + 1),)
    with pytest.raises(
        ValueError, match=r"no prompt of .* is left: 0 rows .* 3 are longer than .* = 1$"
    ):
        _load(path, tokenizer, max_prompt_tokens=1)


def test_missing_and_empty_files_are_refused(tokenizer: Tokenizer, tmp_path: Path):
    path = _write(tmp_path / "train.jsonl", [])
    for given, what in (
        (path, "has no rows"),
        (str(tmp_path / "trian.jsonl"), r"data\.train\.path: no file .*; nearest: .*train\.jsonl"),
        ("nowhere/a.parquet", r"no file /.*/nowhere/a\.parquet$"),
    ):
        with pytest.raises(ValueError, match=what):
            _load(given, tokenizer)


def test_parquet_is_read_without_output(tokenizer: Tokenizer, tmp_path: Path, capfd: Any):
    rows: list[dict[str, Any]] = [GOOD, {**GOOD, "answer": None}, {**GOOD, "question": "b"}]
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list([{**row, "tests": [1, 2]} for row in rows]).to_parquet(str(path))
    capfd.readouterr()
    split = _load(str(path), tokenizer, limit=2, malformed="skip")
    assert [(p.id, p.row["tests"]) for p in split.prompts] == [(1, [1, 2])]
    assert split.malformed == (Malformed(2, "column 'answer' is null"),)
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable Parquet file"):
        _load(str(path), tokenizer)
    assert capfd.readouterr() == ("", "")


HUB = {"path": "openai/gsm8k", "subset": "main", "split": "train"}


def test_a_hub_dataset_gives_the_same_rows(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> datasets.Dataset:
        asked.append((args, kwargs))
        return datasets.Dataset.from_list([GOOD, GOOD])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = _config({**HUB, "limit": 1})
    split = _load_train(config, tokenizer)
    assert [p.id for p in split.prompts] == [1]
    assert asked == [(("openai/gsm8k", "main"), {"split": "train"})]


NAMED = "'openai/gsm8k' (subset 'main', split 'train')"
GATED = datasets.exceptions.DatasetNotFoundError("'openai/gsm8k' is a gated dataset")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConnectionError("so"), "the hub cannot be reached for 'openai/gsm8k' (so)"),
        (GATED, f"{NAMED} is gated: accept its terms on the hub, then `hf auth login`"),
        (ValueError("no split.\nBut a"), f"the hub cannot load {NAMED}: no split. But a"),
    ],
)
def test_hub_errors_become_one_sentence(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
):
    def load_dataset(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="^" + re.escape(f"data.train: {sentence}")):
        _load_train(_config(HUB), tokenizer)


def _splits(folder: Path, **names: str) -> Config:
    sources: dict[str, Any] = {
        name: {
            "path": _write(folder / f"{name}.jsonl", [{"question": q, "answer": "1"} for q in text])
        }
        for name, text in names.items()
    }
    return _config(sources.pop("train"), prompt={"turn": "plain"}, **sources)


def _texts(split: LoadedSplit | None) -> str:
    return "" if split is None else "".join(prompt.text for prompt in split.prompts)


def test_promise_6_shares_of_the_training_data_are_disjoint_and_the_same_each_time(
    tokenizer: Tokenizer, tmp_path: Path
):
    letters = string.ascii_letters + "ab"
    shares: dict[str, Any] = {"validation": {"share": 0.25}, "test": {"share": 0.5, "limit": 5}}
    path = _splits(tmp_path, train=letters).data.train.path
    config = _config({"path": path}, prompt=PLAIN, **shares)
    data = load_data(config, tokenizer)
    parts = [_texts(split) for split in (data.train, data.validation, data.test)]
    assert [len(set(part)) for part in parts] == [52 - 13 - 5, 13, 5]
    assert sorted("".join(parts)) == sorted(letters)  # equal rows are in one split
    assert data.report[-1].startswith(f"test: {len(parts[2])} prompts of data.train")
    _splits(tmp_path, train=letters[::-1])  # the order of the rows has no part in it
    tests = load_tests(config, PromptMaker(config.prompt, tokenizer))
    assert sorted(_texts(tests["test"])) == sorted(parts[2])
    with_file = _config({"path": path}, prompt=PLAIN, validation={"share": 0.25})
    tests = load_tests(with_file, PromptMaker(with_file.prompt, tokenizer))
    assert sorted(_texts(tests["test"])) == sorted(letters)
    _splits(tmp_path, train="abab")
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
    path = _splits(tmp_path, train="abcdefgh").data.train.path
    config = _config({"path": path, "split": split}, prompt=PLAIN)
    assert _texts(_load_train(config, tokenizer)) == texts
    limited = _config({"path": path, "split": split, "limit": 1}, prompt=PLAIN)
    assert _texts(_load_train(limited, tokenizer)) == texts[0]


def _mixture(
    folder: Path, *, prompts_per_step: int = 3, more: str = "kla", **weight: float
) -> Config:
    """Sources `train` and `more`, a validation split, and a set with other columns."""

    def write(name: str, text: str) -> str:
        rows = [{"question": letter, "answer": "1"} for letter in text]
        return _write(folder / f"{name}.jsonl", rows)

    other = [{"q": letter, "solution": f"#### {letter}"} for letter in "dkz"]
    config = _config(
        {"path": write("train", "abcdefg")},
        prompt={"turn": "plain"},
        mixture=[{"name": "more", "path": write("more", more), **weight}],
        validation={"path": write("validation", "czv")},
        test={"path": write("test", "bt")},
    )
    columns = {"template": "{q}", "answer_column": "solution", "answer_pattern": "#### (.+)"}
    sets = [{"name": "other", "path": _write(folder / "other.jsonl", other), **columns}]
    tree = config.model_dump() | {"eval": {"every_steps": 1, "sets": sets}}
    tree["rollout"]["prompts_per_step"] = prompts_per_step
    return Config.model_validate(tree)


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


def test_a_source_smaller_than_its_share_of_a_step_is_refused(tokenizer: Tokenizer, tmp_path: Path):
    message = (
        r"^data\.mixture \(more\): its share of 66\.7% is up to 4 of the rollout\.prompts_per_step"
    )
    with pytest.raises(ValueError, match=message):
        load_data(_mixture(tmp_path, prompts_per_step=6, weight=2.0), tokenizer)


def test_a_split_contained_in_a_later_one_is_refused(tokenizer: Tokenizer, tmp_path: Path):
    with pytest.raises(ValueError, match=r"data\.train: a later split contains all 2 prompts"):
        load_data(_splits(tmp_path, train="ab", test="abc"), tokenizer)
