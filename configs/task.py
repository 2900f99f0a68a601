"""Settings of the task: data, prompt and rewards."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from configs.base import (
    DATA_FILES,
    FREE,
    REWARDS,
    DataPath,
    FreeTable,
    FunctionName,
    Problem,
    Slug,
    Table,
    Text,
    checked,
    is_data_file,
    regex_problem,
)

_NO_COLUMN = re.compile(r"[\"\\]|^'|^\W+$")
"""Names in braces that are JSON, Python or LaTeX, or without a letter; not `user's name`."""


def _pattern_problem(pattern: str) -> str | None:
    problem = regex_problem(pattern)
    if problem is None and not re.compile(pattern).groups:
        return "needs a group, e.g. '#### (.+)'"
    return problem


def _template_problem(template: str) -> str | None:
    """Describes why `template` is not text with column names in braces; None if it is valid."""
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"{error}; write {{{{ and }}}} for braces"
    names = [name for _, name, _, _ in fields if name is not None]
    if not names:
        return "contains no column, so all prompts would be equal; write for example {question}"
    if "" in names:
        return "has empty braces; name a column, e.g. {question}, or write {{}} for braces"
    literal = [
        f"{{{name}{f':{spec}' if spec else ''}}}"
        for _, name, spec, _ in fields
        if name is not None and _NO_COLUMN.search(name)
    ]
    if literal:
        doubled = (text.replace("{", "{{").replace("}", "}}") for text in literal)
        escaped = [re.sub(r"\{\{(\w+)\}\}", r"{\1}", text) for text in doubled]
        return f"{' and '.join(literal)} is no column; for braces write {' and '.join(escaped)}"
    odd = [f"{{{name}}}" for _, name, spec, conversion in fields if spec or conversion]
    if odd:
        return f"converts or formats {' and '.join(odd)}; write {' and '.join(odd)}"
    return None


AnswerPattern = Annotated[str, checked(_pattern_problem)]
Template = Annotated[str, checked(_template_problem)]


FILE_SLICE = re.compile(r"train\[(-?\d+%?)?:(-?\d+%?)?\]")
"""A slice of a local file's rows, in the notation of `datasets`."""


class Source(Table):
    """One split of a dataset: a local file or a dataset on the hub."""

    model_config = ConfigDict(json_schema_extra={"short": {"string": "path"}})

    path: DataPath | None = Field(
        None,
        description="file (.jsonl, .ndjson, .json, .csv, .tsv, .parquet; text files also with .gz) "
        "or hub dataset, e.g. openai/gsm8k",
    )
    subset: Text | None = Field(None, description="hub only: subset (configuration) of the dataset")
    split: Text | None = Field(
        None,
        description="split of a hub dataset, e.g. train or train[-256:]; of a file a slice of its "
        "rows, e.g. train[:1000] or train[-10%:]",
    )
    limit: int | None = Field(None, ge=1, description="use only this many rows from the beginning")

    @property
    def title(self) -> str:
        """What it is, for messages."""
        return self.path or ""

    @property
    def is_file(self) -> bool:
        """Whether `path` names a local file rather than a hub dataset."""
        return self.path is not None and is_data_file(self.path)

    def conflicts(self) -> Iterator[Problem]:
        """A source is a file, or a hub dataset with a split."""
        if self.path is None:
            or_share = " or share" if "share" in type(self).model_fields else ""
            yield "path", f"missing; a source needs path{or_share}"
            return
        if not self.is_file and self.split is None:
            what = f"is not a file ({', '.join(DATA_FILES)}); a hub dataset needs split"
            yield "path", f'{what}, e.g. "train"'
        if self.is_file:
            yield from self.unused("subset", why="with a file")
            if self.split is not None and not FILE_SLICE.fullmatch(self.split):
                what = 'is no slice of a file; write for example "train[:1000]" or "train[-10%:]"'
                yield "split", what


class HeldOut(Source):
    """Rows that training does not see: those of another source, or a share of `data.train`."""

    model_config = ConfigDict(json_schema_extra={"short": {"string": "path", "number": "share"}})

    share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="instead of path: this share of the rows of data.train, chosen by a hash of "
        "the prompt, which training then does not see; limit bounds their number",
    )

    @property
    def title(self) -> str:
        """The path, or what is held out; for messages."""
        return super().title if self.share is None else f"{self.share:.3g} of data.train"

    def conflicts(self) -> Iterator[Problem]:
        """As those of a source; a share has nothing but a limit."""
        if self.share is None:
            yield from super().conflicts()
            return
        others = (key for key in Source.model_fields if key != "limit")
        yield from self.unused(*others, why="with share")


class NamedSource(Source):
    """A dataset with its own name; unset keys default to those of `data` and `prompt`."""

    name: Slug = Field(description="name in metrics, rollouts and results")
    answer_column: Text | None = Field(None, description="default: data.answer_column")
    answer_pattern: AnswerPattern | None = Field(None, description="default: data.answer_pattern")
    template: Template | None = Field(None, description="default: prompt.template")


class MixtureSource(NamedSource):
    """A dataset of the training mixture."""

    weight: float = Field(
        1.0, gt=0, description="sampling weight in the mixture; data.train has weight 1"
    )


OVERLONG = "overlong"
"""Name of the reward part that `rollout.overlong_tokens` adds."""

MIXTURE_TRAIN = "train"
"""Name of `data.train` as a source of the mixture."""


ANSWER_COLUMN = "answer"
"""Default of `data.answer_column`, which a dataset may lack."""


class Data(Table):
    """Training, validation and test data; a prompt in two splits stays only in the later one."""

    train: Source = Field(description="training prompts")
    mixture: Annotated[tuple[MixtureSource, ...], Field(strict=False)] = Field(
        (), description="further sources of training prompts, sampled with data.train by weight"
    )
    validation: HeldOut | None = Field(
        HeldOut(share=0.1, limit=200),
        description="validation split, which chooses the best version; 0.1 is a share of "
        "data.train, 0 none",
    )
    test: HeldOut = Field(
        HeldOut(share=0.1, limit=500),
        description="test split, evaluated once before and once after training, never in between",
    )
    answer_column: Text = Field(
        ANSWER_COLUMN,
        description="column with the reference answer; a.b is the key b in column a. A dataset "
        "without the column of the default has none; rows in chat format then have the last turn, "
        "if it is the assistant's",
    )
    answer_pattern: AnswerPattern | None = Field(
        None, description="regular expression whose first group is the answer in that column"
    )
    malformed: Literal["refuse", "skip"] = Field(
        "refuse", description="malformed rows: refuse: do not start; skip: report and exclude them"
    )

    def conflicts(self) -> Iterator[Problem]:
        """The sources of the mixture have different names."""
        names = [MIXTURE_TRAIN, *(source.name for source in self.mixture)]
        yield from repeated_names("mixture", names)


def repeated_names(key: str, names: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem at `key` if two of the names are equal."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        yield key, f"two share the name {', '.join(repeated)}; names must differ"


AnswerPlace = Literal[
    "tags", "completion", "first_line", "last_line", "boxed", "stated", "last_number"
]
"""Where the answer of a completion is; see `rewards.answers.find_answer`."""


class Shot(Table):
    """A few-shot example at the beginning of every prompt."""

    user: Text = Field(description="turn of the user, e.g. a question")
    model: Text = Field(description="turn of the model: its completion, e.g. with the answer tags")


_TAGS = ("reasoning_open", "reasoning_close", "answer_open", "answer_close")


class Prompt(Table):
    """The prompt, for training and evaluation."""

    system: str = Field(
        "",
        description="system text: the turn of the system (Gemma 4), or the beginning of the user's "
        "first turn",
    )
    template: Template = Field(
        "{question}",
        description="template of the question, with {columns} of the dataset. A single column, "
        'e.g. "{messages}", may be in chat format: lists of turns with role and content',
    )
    turn: Literal["auto", "gemma", "plain"] = Field(
        "auto",
        description="chat format. auto: the chat template of the model's folder, else gemma; "
        "gemma: Gemma's turns; plain: text without turns",
    )
    thinking: bool = Field(
        False,
        description="Gemma 4 only: ask the model to think before it answers. Its thoughts are part "
        'of the completion, from "<|channel>thought" to "<channel|>", which reasoning_open and '
        "reasoning_close can name",
    )
    shots: Annotated[tuple[Shot, ...], Field(strict=False)] = Field(
        (),
        description="few-shot examples before each question, one user and one model turn each; "
        "with turn = plain an empty line ends each example",
    )
    answer_prefix: str = Field(
        "",
        description='text at the beginning of every completion, e.g. "<reasoning>"; it is part of '
        "the prompt: neither sampled nor trained on, and counted in rollout.max_prompt_tokens",
    )
    answer: AnswerPlace = Field(
        "tags",
        description="where the answer of a completion is, for rewards, evaluation and checks. "
        "tags: between the last answer_open and answer_close; completion: all of it; first_line, "
        "last_line: the first or last line that is not empty; boxed: the last \\boxed{...}; "
        'stated: after the last "answer is" or "answer:"; last_number: the last number. '
        "answer_prefix, and a stop string at the end, are no part of it",
    )
    reasoning_open: str = Field(
        "<reasoning>", min_length=1, description="opening tag of the reasoning"
    )
    reasoning_close: str = Field(
        "</reasoning>", min_length=1, description="closing tag of the reasoning"
    )
    answer_open: str = Field("<answer>", min_length=1, description="opening tag of the answer")
    answer_close: str = Field("</answer>", min_length=1, description="closing tag of the answer")

    def conflicts(self) -> Iterator[Problem]:
        """The four tags differ and are used; only a turn can ask for thoughts."""
        if self.turn == "plain":
            yield from self.unused("thinking", why='with turn = "plain"')
        if self.thinking and self.answer in {"completion", "first_line"}:
            what = f'"{self.answer}" begins with the thoughts, with thinking = true'
            yield "answer", f'{what}; nearest valid: "last_line"'
        if self.answer != "tags":
            yield from self.unused(*_TAGS, why=f'with answer = "{self.answer}"')
        tags = set()
        for key in _TAGS:
            tag = getattr(self, key)
            if tag in tags:
                yield key, "equals another tag; the four tags must differ"
            tags.add(tag)


REWARD_METRICS = frozenset(
    {
        *("mean", "std", "group_std", "corr_length", "corr_correct"),
        *("errors", "excluded_share", "changed"),
    }
)
"""Metrics `reward/NAME` of the weighted sum; those of parts have the parts' names."""


ACCURACY_REWARDS = (
    "rewards.correctness:exact_answer",
    "rewards.numeric:numeric_answer",
    "rewards.latex:latex_answer",
    "rewards.choice:choice_letter",
)
"""Functions of the library that give 1 to a right answer and 0 to a wrong one."""
CONCURRENCY = 16
"""Default of `concurrency` of an async reward."""


class RewardFunction(Table):
    """One part of the reward."""

    model_config = ConfigDict(json_schema_extra={"short": {"string": "function"}})

    name: Slug = Field(
        description="name in metrics and rollouts",
        json_schema_extra={"implied": "that of the function"},
    )
    function: FunctionName = Field(
        description="function or class: file.py:name, or module:name of an installed module, e.g. "
        "rewards.correctness:exact_answer",
    )
    weight: float = Field(
        1.0, description="weight of the part; the reward is the weighted sum of the parts"
    )
    args: FreeTable = Field(
        {}, description="keyword arguments of the function, or of the constructor of a class"
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        description="time limit of a call in seconds; default: rewards.timeout_s",
        json_schema_extra=FREE,
    )
    on_error: Literal["exclude", "group", "stop"] = Field(
        "exclude",
        description="what an error excludes. exclude: the rollout; group: all rollouts of its "
        "prompt; stop: the run stops with a checkpoint",
    )
    workers: int | None = Field(
        None,
        ge=1,
        description="processes of this function; default: rewards.workers",
        json_schema_extra=FREE,
    )
    concurrency: int | None = Field(
        None,
        ge=1,
        description="async functions only: completions that a process scores at a time; default: "
        f"{CONCURRENCY}",
        json_schema_extra=FREE,
    )


class Rewards(Table):
    """Reward functions and the processes that call them."""

    functions: Annotated[tuple[RewardFunction, ...], Field(strict=False, min_length=1)] = Field(
        description="the parts of the reward", json_schema_extra=REWARDS
    )
    workers: int = Field(
        1, ge=1, description="number of CPU processes of each function", json_schema_extra=FREE
    )
    timeout_s: float = Field(
        30.0,
        gt=0,
        description="time limit of a call in seconds; a call that exceeds it is killed, repeated "
        "once alone, then counted and excluded",
        json_schema_extra=FREE,
    )
    memory_gib: float = Field(
        8.0,
        gt=0,
        description="memory limit of a reward process in GiB, without shared memory",
        json_schema_extra=FREE,
    )
    shuffle: bool = Field(
        False,
        description="control experiment: permute the rewards over a step's rollouts",
        json_schema_extra=REWARDS,
    )

    def conflicts(self) -> Iterator[Problem]:
        """The parts have different names, which are not those of other metrics."""
        names = [part.name for part in self.functions]
        yield from repeated_names("functions", names)
        for name in sorted(REWARD_METRICS.intersection(names)):
            what = f"reward/{name} is a metric of the weighted sum; name the part otherwise"
            yield "functions", what

    def single_process(self) -> Rewards:
        """The same functions with one process each, to try them."""
        parts = tuple(part.model_copy(update={"workers": 1}) for part in self.functions)
        return self.model_copy(update={"functions": parts})
