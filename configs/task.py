"""The settings that say what is learned: data, prompt, rewards."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.base import FunctionName, LocalPath, Problem, Slug, Table, Text, checked, refuse


def _pattern_problem(pattern: str) -> str | None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"is not a regular expression: {error}"
    return None if groups else "needs a group, e.g. '#### (.+)'"


def _template_problem(template: str) -> str | None:
    """What keeps `template` from being text with bare column names in braces."""
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"{error}; write {{{{ and }}}} for braces"
    names = [name for _, name, _, _ in fields if name is not None]
    if not names:
        return "names no column, so all prompts would be equal; write for example {question}"
    if "" in names:
        return "has empty braces; name a column, e.g. {question}, or write {{}} for braces"
    odd = [f"{{{name}}}" for _, name, spec, conversion in fields if spec or conversion]
    if odd:
        return f"converts or formats {' and '.join(odd)}; write {' and '.join(odd)}"
    return None


AnswerPattern = Annotated[str, checked(_pattern_problem)]
Template = Annotated[str, checked(_template_problem)]


class Source(Table):
    """One split of a dataset: a local JSONL or Parquet file, or a dataset on the hub."""

    path: LocalPath = Field(description="file (.jsonl, .parquet) or hub dataset, e.g. openai/gsm8k")
    subset: Text | None = Field(None, description="hub only: the dataset's configuration")
    split: Text | None = Field(None, description="hub only: the split's name there")
    limit: int | None = Field(None, ge=1, description="use at most this many rows, the first ones")

    @property
    def is_file(self) -> bool:
        """Whether `path` names a local file rather than a hub dataset."""
        return self.path.endswith((".jsonl", ".parquet"))

    @model_validator(mode="after")
    def _hub_keys(self) -> Source:
        problems: list[Problem] = []
        if not self.is_file and self.split is None:
            what = 'is no .jsonl or .parquet file; a hub dataset needs split, e.g. "train"'
            problems.append(("path", what))
        if self.is_file:
            problems += [
                (key, "belongs to hub datasets; a file is a split by itself; remove it")
                for key in ("subset", "split")
                if getattr(self, key) is not None
            ]
        refuse(problems)
        return self


class NamedSource(Source):
    """A dataset with a name of its own, read as `data` says unless it says otherwise."""

    name: Slug = Field(description="its name in metrics, rollouts and results")
    answer_column: Text | None = Field(None, description="default: data.answer_column")
    answer_pattern: AnswerPattern | None = Field(None, description="default: data.answer_pattern")
    template: Template | None = Field(None, description="default: prompt.template")


class Mixed(NamedSource):
    """A dataset that is mixed into training."""

    weight: float = Field(1.0, gt=0, description="its share of the prompts; data.train weighs 1")


OVERLONG = "overlong"
"""Name of the part of the reward that `rollout.overlong_tokens` adds."""

MIXTURE_TRAIN = "train"
"""Name of `data.train` among the sources of a mixture."""


class Data(Table):
    """What is trained on, watched and tested; rows in two splits stay only in the later one."""

    train: Source = Field(description="prompts that are learned from")
    mixture: Annotated[tuple[Mixed, ...], Field(strict=False)] = Field(
        (), description="more sources of training prompts, drawn beside data.train by weight"
    )
    validation: Source | None = Field(None, description="watched during training")
    test: Source = Field(description="read once before and once after, never between")
    answer_column: Text = Field("answer", description="column with the reference answer")
    answer_pattern: AnswerPattern | None = Field(
        None, description="regular expression whose first group is the answer inside that column"
    )
    malformed: Literal["refuse", "skip"] = Field(
        "refuse", description="what to do when rows cannot be used: stop, or report and go on"
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Data:
        names = [MIXTURE_TRAIN, *(source.name for source in self.mixture)]
        refuse(repeated_names("mixture", names))
        return self


def repeated_names(key: str, names: Sequence[str]) -> list[Problem]:
    """A problem at `key` if two of the names are equal."""
    twice = sorted({name for name in names if names.count(name) > 1})
    return [(key, f"two share a name, {', '.join(twice)}; names must differ")] if twice else []


class Shot(Table):
    """A worked example that every prompt begins with."""

    user: Text = Field(description="what the user asks, e.g. a question")
    model: Text = Field(description="what the model answers, tags included")


class Prompt(Table):
    """What the model reads; one source for training and evaluation."""

    system: str = Field("", description="text that opens the user's first turn")
    template: Template = Field(
        "{question}", description="the question, with the dataset's {columns}"
    )
    turn: Literal["auto", "gemma", "plain"] = Field(
        "auto",
        description="auto: the chat template of the model's folder, Gemma's turns where it has "
        "none; gemma: Gemma's turns; plain: the text alone",
    )
    shots: Annotated[tuple[Shot, ...], Field(strict=False)] = Field(
        (),
        description="worked examples before each question (few-shot), a turn each; in plain text "
        "an empty line ends each",
    )
    answer_prefix: str = Field(
        "",
        description='text that every completion begins with, e.g. "<reasoning>"; it is read behind '
        "the prompt, not drawn, not learned, and counts in rollout.max_prompt_tokens",
    )
    reasoning_open: str = Field("<reasoning>", min_length=1, description="opens the reasoning")
    reasoning_close: str = Field("</reasoning>", min_length=1, description="closes it")
    answer_open: str = Field("<answer>", min_length=1, description="opens the answer")
    answer_close: str = Field("</answer>", min_length=1, description="closes it")

    @model_validator(mode="after")
    def _tags_differ(self) -> Prompt:
        keys = ("reasoning_open", "reasoning_close", "answer_open", "answer_close")
        tags = [getattr(self, key) for key in keys]
        problems = [
            (key, "is the same tag as another one; the four must differ")
            for i, key in enumerate(keys)
            if tags[i] in tags[:i]
        ]
        refuse(problems)
        return self


class RewardFunction(Table):
    """One part of the reward."""

    name: Slug = Field(description="its name in metrics and rollouts")
    function: FunctionName = Field(
        description="where it is: module:function, e.g. rewards.correctness:exact_answer",
    )
    weight: float = Field(1.0, description="the reward is the weighted sum of the parts")


class Rewards(Table):
    """How rollouts are scored."""

    functions: Annotated[tuple[RewardFunction, ...], Field(strict=False, min_length=1)] = Field(
        description="the parts of the reward"
    )
    workers: int = Field(1, ge=1, description="CPU processes that score")
    timeout_s: float = Field(
        30.0, gt=0, description="a call that takes longer is killed, counted and excluded"
    )
    max_excluded_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="the run stops if a larger share of a step's rollouts has no reward; 1: never",
    )
    shuffle: bool = Field(
        False, description="control experiment: permute the rewards over the step's rollouts"
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Rewards:
        refuse(repeated_names("functions", [part.name for part in self.functions]))
        return self
