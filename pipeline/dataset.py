"""From dataset rows to prompts: the three splits as the model will see them.

Rows that cannot be used are refused or reported, over-long prompts are counted and left out (never
cut), and no prompt stands in two splits. Order is not decided here (see order.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from configs.schema import Config, Data, Source
from pipeline.chat import END_OF_TURN, START_OF_TURN, render, template_columns
from pipeline.datatypes import Prompt
from pipeline.rows import DataError, Malformed, Row
from pipeline.sources import read_rows
from pipeline.splits import LoadedData, LoadedSplit, list_rows, without_overlaps
from pipeline.tokenizer import Tokenizer


def load_data(config: Config, tokenizer: Tokenizer) -> LoadedData:
    """Load all splits; what stands in two of them stays in the later of train, validation, test.

    Raises:
        DataError: if a split cannot be read, has malformed rows that `data.malformed` refuses, or
            has no prompt left.
    """
    data = config.data
    test = load_split(data.test, name="test", config=config, tokenizer=tokenizer)
    validation = None
    if data.validation is not None:
        loaded = load_split(data.validation, name="validation", config=config, tokenizer=tokenizer)
        validation = without_overlaps(loaded, [test], name="validation")
    train = load_split(data.train, name="train", config=config, tokenizer=tokenizer)
    later = [test] if validation is None else [test, validation]
    return LoadedData(without_overlaps(train, later, name="train"), validation, test)


def load_split(source: Source, *, name: str, config: Config, tokenizer: Tokenizer) -> LoadedSplit:
    """Load one split.

    Raises:
        DataError: as `load_data`.
    """
    columns = (*template_columns(config.prompt.template), config.data.answer_column)
    rows, malformed = read_rows(source, columns=tuple(dict.fromkeys(columns)), where=f"data.{name}")
    prompts, too_long = list[Prompt](), list[int]()
    for row in rows:
        prompt = _make_prompt(row, config=config, tokenizer=tokenizer)
        if isinstance(prompt, Malformed):
            malformed.append(prompt)
        elif len(prompt.tokens) > config.rollout.max_prompt_tokens:
            too_long.append(row.number)
        else:
            prompts.append(prompt)
    malformed.sort(key=lambda bad: bad.row)
    if malformed and config.data.malformed == "refuse":
        raise DataError("\n".join(_refusal(malformed, source=source, name=name)))
    distinct = {(prompt.text, prompt.answer) for prompt in prompts}
    split = LoadedSplit(
        prompts=tuple(prompts),
        malformed=tuple(malformed),
        too_long=tuple(too_long),
        duplicates=len(prompts) - len(distinct),
    )
    return _not_empty(split, name=name, limit=config.rollout.max_prompt_tokens)


def extract_reference(text: str, *, data: Data) -> str | None:
    """The reference answer in the answer column's text, None if `data.answer_pattern` fails."""
    if data.answer_pattern is None:
        return text.strip()
    match = re.search(data.answer_pattern, text)
    answer = match.group(1) if match else None
    return answer.strip() or None if answer else None


def _make_prompt(row: Row, *, config: Config, tokenizer: Tokenizer) -> Prompt | Malformed:
    column = config.data.answer_column
    answer = extract_reference(str(row.values[column]), data=config.data)
    if answer is None:
        pattern = config.data.answer_pattern
        return Malformed(row.number, f"column {column!r} has no answer by the pattern {pattern!r}")
    text = render(config.prompt, row.values)
    if config.prompt.turn == "gemma":
        for named in template_columns(config.prompt.template):
            for token in (START_OF_TURN, END_OF_TURN):
                if token in str(row.values[named]):
                    return Malformed(row.number, f"column {named!r} holds the turn token {token}")
    tokens = np.concatenate([[tokenizer.bos_id], tokenizer.encode(text)]).astype(np.int32)
    return Prompt(id=row.number, text=text, tokens=tokens, answer=answer, row=row.values)


def _not_empty(split: LoadedSplit, *, name: str, limit: int) -> LoadedSplit:
    if not split.prompts:
        raise DataError(
            f"data.{name}: no prompt is left: {len(split.malformed)} rows are malformed and "
            f"{len(split.too_long)} are longer than rollout.max_prompt_tokens = {limit}"
        )
    return split


def _refusal(malformed: Sequence[Malformed], *, source: Source, name: str) -> Iterator[str]:
    rows = "row is" if len(malformed) == 1 else "rows are"
    yield f"data.{name}: {len(malformed)} {rows} malformed in {source.path}:"
    yield from list_rows(malformed)
    yield 'mend them, or leave them out with data.malformed = "skip"'
