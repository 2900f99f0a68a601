"""Datasets of reasoning-gym as sources: equal settings give equal rows, splits share no item."""

from __future__ import annotations

import json
from typing import Any

import pytest

from configs.schema import Config
from pipeline.data import procedural
from pipeline.data.load import load_data
from pipeline.data.procedural import generate_rows
from pipeline.data.text.tokenizer import Tokenizer
from tests.pipeline.data.test_load import _config

SMALL = {"max_terms": 2, "max_digits": 1}
"""200 different questions of chain_sum."""


Settings = dict[str, Any]


def source(
    name: str = "chain_sum", *, seed: int, size: int = 5, settings: Settings | None = None
) -> Settings:
    return {"reasoning_gym": name, "size": size, "seed": seed, "settings": settings or {}}


def config(train: Settings, test: Settings, **data: Settings) -> Config:
    return _config(train, max_prompt_tokens=200, test=test, **data)


def test_rows_are_the_items_of_the_dataset() -> None:
    rows = generate_rows("chain_sum", size=3, seed=2, settings={"max_terms": 3})
    from reasoning_gym import create_dataset

    items = list(create_dataset("chain_sum", size=3, seed=2_000_000, max_terms=3))
    assert [(row["question"], row["answer"]) for row in rows] == [
        (item["question"], item["answer"]) for item in items
    ]
    assert [json.loads(row["entry"])["metadata"]["expression"] for row in rows] == [
        item["metadata"]["expression"] for item in items
    ]


def test_rows_do_not_depend_on_the_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for hash_seed in ("1", "2"):
        # This dataset takes words out of a set.
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        found.append(generate_rows("word_ladder", size=2, seed=1, settings={}))
    assert found[0] == found[1]


def test_splits_share_no_item(tokenizer: Tokenizer) -> None:
    loaded = load_data(
        config(
            source(seed=1, size=150, settings=SMALL),
            source(seed=2, size=60, settings=SMALL),
            validation=source(seed=3, size=60, settings=SMALL),
        ),
        tokenizer,
    )
    assert loaded.validation is not None
    splits = [loaded.train, loaded.validation, loaded.test]
    texts = [{prompt.text for prompt in split.prompts} for split in splits]
    assert all(texts)
    assert len(set.union(*texts)) == sum(map(len, texts))
    assert loaded.train.overlaps == 150 - len(loaded.train.prompts) > 0
    assert len(loaded.test.prompts) == 60
    prompt = loaded.train.prompts[0]
    assert prompt.row["answer"] == prompt.answer
    assert "State the final answer" in prompt.text


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("chain_sun", {}, "reasoning-gym has no dataset 'chain_sun'; nearest: 'chain_sum'"),
        ("composite", {}, "reasoning-gym has no dataset 'composite'"),
        ("chain_sum", {"max_term": 3}, "chain_sum has no setting 'max_term'; nearest: 'max_terms'"),
        ("chain_sum", {"seed": 3}, "chain_sum has no setting 'seed'"),
        ("chain_sum", {"max_terms": 0}, "chain_sum refuses {'max_terms': 0}: AssertionError: max"),
    ],
)
def test_what_reasoning_gym_refuses(name: str, settings: Settings, told: str) -> None:
    request = {"name": name, "size": 1, "seed": 1, "settings": settings}
    assert f"{procedural._generate(request)}".startswith(told)


def test_a_refusal_names_the_source(tokenizer: Tokenizer) -> None:
    train = source("chain_sun", seed=1)
    with pytest.raises(ValueError, match=r"data\.train: reasoning-gym has no .* 'chain_sum'"):
        load_data(config(train, source(seed=2)), tokenizer)
