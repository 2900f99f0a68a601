"""Files with the rows of a test, and the configurations that read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from configs.schema import Config
from tests.samples import make_config

Rows = Sequence[Any]
APART: dict[str, Any] = {
    **dict.fromkeys(("question", "prompt", "conversations"), "apart"),
    "messages": [{"role": "user", "content": "apart"}],
    "answer": "#### 0",
}
"""A row of any form, for a test split whose prompt differs from all others."""


def write_rows(path: Path, rows: Rows) -> dict[str, str]:
    """The source of a file of `rows`; strings are lines of JSONL as they are."""
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(list(rows)).to_parquet(str(path))
    else:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return {"path": str(path)}


def questions(texts: str) -> Rows:
    """A row for each letter."""
    return [{"question": letter, "answer": "1"} for letter in texts]


def config_of(
    folder: Path,
    train: Rows | Mapping[str, Any],
    *,
    test: Rows = (APART,),
    kind: str = "jsonl",
    **tables: Mapping[str, Any],
) -> Config:
    """A configuration whose training data are these rows, or this source."""
    if not isinstance(train, Mapping):
        train = write_rows(folder / f"train.{kind}", train)
    given: dict[str, Any] = {
        "data": {"train": train, "test": write_rows(folder / "test.jsonl", test)},
        "rollout": {"prompts_per_step": 1, "max_prompt_tokens": 300},
    }
    return make_config(
        folder, **tables | {name: table | tables.get(name, {}) for name, table in given.items()}
    )
