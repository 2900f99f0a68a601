"""Generates the rows of a dataset of reasoning-gym, in a child process.

Some of its datasets depend on the order of sets, so the child has a fixed hash seed: equal settings
give equal rows in every process. This file imports nothing else of the project, so that the child,
which runs it, needs no path.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

SEED_STRIDE = 10**6
"""reasoning-gym makes item i from seed + i. The seeds here are this far apart, so that no item of
one seed is an item of another."""


def generate_rows(
    name: str, *, size: int, seed: int, settings: Mapping[str, Any]
) -> list[dict[str, str]]:
    """Generates `size` rows with text columns.

    Columns:
        question: the text of the question.
        answer: the reference answer; absent if the item has none, because many are right.
        entry: the whole item as JSON, which `rewards.gym:score_answer` reads. A tuple is the object
            `{"tuple": [...]}`.

    Args:
        name: name of a dataset of reasoning-gym.
        size: number of rows, at most `SEED_STRIDE`.
        seed: the seed; different seeds share no item.
        settings: further settings of the dataset.

    Raises:
        ValueError: if reasoning-gym is not installed, or refuses the name or the settings.
    """
    request = {"name": name, "size": size, "seed": seed, "settings": dict(settings)}
    child = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps(request),
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1:] or [""]
        raise ValueError(
            f"generating rows ended Python with status {child.returncode}: {last[0][:500]}"
        )
    found = json.loads(child.stdout)
    if isinstance(found, str):
        raise ValueError(found)
    return [
        {
            "question": entry["question"],
            **({} if entry["answer"] is None else {"answer": str(entry["answer"])}),
            "entry": json.dumps(entry),
        }
        for entry in found
    ]


def _generate(request: Mapping[str, Any]) -> str | list[Any]:
    """The items; or, as text, what is wrong with the request."""
    name, settings = request["name"], request["settings"]
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        return "reasoning-gym is not installed: `make install-rewards`, or install reasoning-gym"
    known = DATASETS.keys() - {"composite"}  # its parts are no plain settings
    if name not in known:
        return f"reasoning-gym has no dataset {name!r}{_nearest(name, known)}"
    kind = DATASETS[name][1]
    fields = set(kind.__dataclass_fields__) - {"seed", "size"}
    for key in settings:
        if key not in fields:
            return f"{name} has no setting {key!r}{_nearest(key, fields)}"
    try:
        dataset = create_dataset(
            name, size=request["size"], seed=request["seed"] * SEED_STRIDE, **settings
        )
        return [_plain(dataset[index]) for index in range(request["size"])]
    except Exception as error:  # noqa: BLE001 - each dataset checks its settings in its own way
        return f"{name} refuses {settings}: {type(error).__name__}: {error}"


def _nearest(name: str, known: Sequence[str] | set[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; nearest: {nearest[0]!r}" if nearest else f"; it has {', '.join(sorted(known))}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(one) for one in value]}
    return value


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # some datasets print
        generated = _generate(json.load(sys.stdin))
    json.dump(generated, sys.stdout)
