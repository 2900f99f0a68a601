"""Compares what reward functions need with the columns of the data that they score."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from configs.base import name_hint
from configs.schema import Config
from configs.task import MIXTURE_TRAIN
from pipeline.data.load import setting_name
from pipeline.data.splits import MIXTURE_PREFIX, LoadedData, LoadedSplit
from rewards.base import RewardFacts


def scored_splits(config: Config, data: LoadedData) -> Iterator[tuple[str, LoadedSplit]]:
    """The splits whose completions are scored by the reward functions."""
    for name, split in data.splits():
        trained = name == MIXTURE_TRAIN or name.startswith(MIXTURE_PREFIX)
        if trained or name == "validation" or config.uses_rewards:
            yield name, split


def check_columns(
    rewards: Sequence[RewardFacts], splits: Iterable[tuple[str, LoadedSplit]]
) -> None:
    """Compares the columns that reward functions need with those of the data.

    Raises:
        ValueError: with a line for each column or reference answer that is missing.
    """
    mistakes = []
    for name, split in splits:
        row, without = split.prompts[0].row, split.without_answer
        for facts in rewards:
            needs = f"rewards.functions: {facts.name!r} needs"
            if facts.needs_answer and without is not None:
                mistakes.append(f"{needs} reference answers: {setting_name(name)}: {without}")
            mistakes += [
                f"{needs} {column!r}: {setting_name(name)} has no such column, and "
                f"args.{column} is not set{name_hint(column, row)}"
                for column in facts.columns
                if column not in row
            ]
    if mistakes:
        raise ValueError("\n".join(mistakes))
