"""Rewards of reasoning-gym: its datasets score answers themselves.

reasoning-gym is in the extra `rewards`. Rows of the data source `reasoning_gym` have the column
`entry`, which holds the item.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from configs.task import AnswerPlace
from rewards.answers import find_answer
from rewards.base import Tags

try:
    from reasoning_gym import get_score_answer_fn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "run `make install-rewards`, or install reasoning-gym", name=error.name
    ) from error


def score_answer(
    completion: str,
    *,
    entry: str,
    tags: Tags,
    extraction: AnswerPlace | None = None,
    full_only: bool = False,
) -> float:
    """The score of the completion's answer by the reasoning-gym dataset of the row, from 0 to 1.

    A completion without an answer scores 0, and so does one whose answer the dataset cannot read.

    >>> item = {"question": "2 + 3 =", "answer": "5", "metadata": {"source_dataset": "chain_sum"}}
    >>> score_answer("<answer>5.0</answer>", entry=json.dumps(item), tags=tags)
    1.0
    >>> score_answer("<answer>4</answer>", entry=json.dumps(item), tags=tags)
    0.0

    Known hacks:
        a list of guesses: many datasets give len(reference) / len(answer) to an answer that
        contains the reference; `full_only` scores it 0.
        any answer at all: some datasets give up to 0.05 to each; `full_only` scores it 0.
        game_of_life_halting gives 1 to every answer (reasoning-gym 0.1.25).
        binary_matrix, n_queens, spiral_matrix and string_insertion evaluate answers as Python;
        the limits of the reward process hold.

    Args:
        completion: the completion.
        entry: the item as JSON, with "question", "answer" and "metadata".
        tags: the configured tags.
        extraction: where the answer is, if not as `prompt.answer` says; see
            `rewards.answers.find_answer`.
        full_only: whether partial credit counts as 0.

    Raises:
        ValueError: if `entry` is no item of a dataset of reasoning-gym.
    """
    item, score = _item(entry)
    answer = find_answer(completion, tags=tags, extraction=extraction)
    if answer is None:
        return 0.0
    try:
        value = float(score(answer, item))
    except Exception:  # noqa: BLE001 - each dataset parses answers in its own way
        # Some datasets raise on answers that they cannot parse. If the dataset scores its own
        # answer, this one is at fault.
        score(item["answer"], item)
        return 0.0
    return value if value >= 1 or not full_only else 0.0


@functools.lru_cache(maxsize=1024)  # one item has many completions
def _item(entry: str) -> tuple[Mapping[str, Any], Callable[[str, Mapping[str, Any]], float]]:
    try:
        item = json.loads(entry, object_hook=_restored)
        name = item["metadata"]["source_dataset"]
    except (ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the column entry is no item of reasoning-gym, as JSON ({what}): {entry[:100]!r}"
        ) from None
    return item, _scorer(name)


@functools.cache
def _scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
    score: Callable[[str, Mapping[str, Any]], float] = get_score_answer_fn(name)
    return score


def _restored(value: dict[str, Any]) -> Any:
    """An object of the JSON text; `{"tuple": [...]}` is a tuple."""
    return tuple(value["tuple"]) if value.keys() == {"tuple"} else value
