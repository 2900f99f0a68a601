"""The rows on which `launch.reward` tries reward functions, without the model and its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from configs.schema import Config
from configs.schema import Prompt as PromptConfig
from pipeline.data.load import answer_settings, extract_reference, load_data
from pipeline.data.rows import kind_of
from pipeline.data.splits import LoadedData
from pipeline.data.text.chat import GEMMA3, GEMMA4, render, template_columns
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.types import Prompt
from rewards.base import RewardInput, Tags
from rewards.checks.cases import RowOf
from rewards.checks.probes import ProbeRow

_LONGEST = 2**31


def read_training_data(config: Config) -> LoadedData:
    """The training data of a run, with Gemma's turns in the prompts.

    Nothing depends on the tokenizer: overlong prompts are kept.

    Raises:
        ValueError: as `load_data`.
    """
    changes: dict[str, dict[str, object]] = {
        "rollout": {"max_prompt_tokens": _LONGEST},
        "data": {"validation": None},
        "eval": {"sets": ()},
        "run": {"phases": ("grpo",)},
    }
    tables = {name: getattr(config, name).model_copy(update=one) for name, one in changes.items()}
    return load_data(config.model_copy(update=tables), _Bytes(config.prompt))


def probe_rows(prompts: Sequence[Prompt], config: Config, *, count: int) -> list[ProbeRow]:
    """Rows spread evenly over the prompts, at most `count`."""
    count = min(count, len(prompts))
    chosen = (prompts[index * len(prompts) // count] for index in range(count))
    tags = Tags.of_run(config)
    return [
        ProbeRow(prompt.reward_input("", stop_reason="eos", tags=tags), _solution(prompt, config))
        for prompt in chosen
    ]


def case_rows(prompts: Sequence[Prompt], config: Config) -> RowOf:
    """Finds the rows of cases by prompt id, or makes them of their columns."""
    tags, by_id = Tags.of_run(config), {prompt.id: prompt for prompt in prompts}

    def given(prompt: Prompt) -> RewardInput:
        return prompt.reward_input("", stop_reason="eos", tags=tags)

    def find(row: int | Mapping[str, object] | None) -> RewardInput:
        if isinstance(row, Mapping):
            return _made(row, config)
        if row is None:
            return given(prompts[0])
        if row not in by_id:
            nearest = min(by_id, key=lambda id_: abs(id_ - row))
            raise ValueError(f"row: there is no row {row} in the training data; nearest: {nearest}")
        return given(by_id[row])

    return find


def _made(row: Mapping[str, object], config: Config) -> RewardInput:
    """The input of a row that is not in the dataset.

    Raises:
        ValueError: if it lacks columns of the prompt, or one of them is not text or a number.
    """
    for column in template_columns(config.prompt.template):
        if isinstance(row.get(column), list | dict):
            raise ValueError(
                f"row: column {column!r} is {kind_of(row[column])}, not text; for chat messages "
                "give the number of a row in the training data"
            )
    text = render(config.prompt, row, template=None, turns=_Bytes(config.prompt).turns)
    answer = row.get(config.data.answer_column)
    if answer is not None:
        answer = extract_reference(f"{answer}", pattern=config.data.answer_pattern)
    return RewardInput(text, "", "eos", answer, row, Tags.of_run(config))


def _solution(prompt: Prompt, config: Config) -> str | None:
    """The worked-out solution of a row: what precedes the answer in its column."""
    data = config.data
    own = (source for source in data.mixture if source.name == prompt.source)
    column, pattern = answer_settings(next(own, data.train), data)
    text = prompt.row.get(column)
    found = re.search(pattern, text) if pattern is not None and isinstance(text, str) else None
    return (found.string[: found.start()].strip() or None) if found else None


class _Bytes(Tokenizer):
    """UTF-8 bytes as tokens: prompts are read without the model's files."""

    path = Path("bytes")
    vocab_size, pad_id, eos_id, bos_id = 256, 0, 0, 0

    def __init__(self, prompt: PromptConfig) -> None:
        # Which model it is is not known; only a Gemma 4 can think.
        self.turns = GEMMA4 if prompt.thinking else GEMMA3

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return bytes(map(int, tokens)).decode(errors="replace")

    def find(self, piece: str) -> int | None:
        return None if len(piece.encode()) != 1 else piece.encode()[0]

    def piece(self, id_: int) -> str:
        return bytes([id_]).decode(errors="replace")
