"""From dataset rows to prompts: all splits and sources as the model will see them.

Rows that cannot be used are refused or reported, over-long prompts are counted and left out (never
cut), and what is learned from stands in nothing that is measured. Order is not decided here (see
order.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import Config, Data, NamedSource, Source
from configs.task import MIXTURE_TRAIN
from pipeline.datatypes import Prompt
from pipeline.examples import load_examples
from pipeline.order import most_of_a_source, shares
from pipeline.prompts import PromptMaker
from pipeline.rows import DataError, Malformed, Row, refuse_malformed
from pipeline.sources import read_rows
from pipeline.splits import LoadedData, LoadedSplit, joined, texts, without_overlaps
from pipeline.tokenizer import Tokenizer

SOURCE_STRIDE = 10**9
"""Prompts of a mixture's n-th source have ids from n times this: unique, and at home in a run."""


@dataclass(frozen=True)
class Reading:
    """How a dataset's rows become prompts.

    Attributes:
        source: where they are.
        where: the setting that names the source, for messages.
        maker: makes the prompts.
        answer_column: column with the reference answer.
        answer_pattern: finds it in there; None: it is all of it.
        mixed_as: what the prompts' source is called in a mixture; None: there is no mixture.
        first_id: added to a row's number, for the prompt's id.
    """

    source: Source
    where: str
    maker: PromptMaker
    answer_column: str
    answer_pattern: str | None
    mixed_as: str | None = None
    first_id: int = 0

    @staticmethod
    def of(source: Source, *, where: str, config: Config, maker: PromptMaker) -> Reading:
        """As `data` and `prompt` say, unless the source says otherwise."""
        column, pattern = config.data.answer_column, config.data.answer_pattern
        if isinstance(source, NamedSource):
            maker = maker.with_template(source.template)
            column = source.answer_column or column
            pattern = pattern if source.answer_pattern is None else source.answer_pattern
        return Reading(source, where, maker, column, pattern)


def load_data(config: Config, tokenizer: Tokenizer) -> LoadedData:
    """Load everything that a run reads.

    What is measured stays whole: a prompt of the test split or of an evaluation set is taken out
    of validation, one of any of these out of all training sources and examples.

    Raises:
        DataError: if a source cannot be read, has malformed rows that `data.malformed` refuses,
            has no prompt left, or has fewer than a step may ask of it.
    """
    data, maker = config.data, PromptMaker(config.prompt, tokenizer)

    def load(source: Source, where: str, **mixed: Any) -> LoadedSplit:
        reading = Reading.of(source, where=where, config=config, maker=maker)
        return load_split(replace(reading, **mixed), config=config)

    test = load(data.test, "data.test")
    sets = {source.name: load(source, f"eval.sets ({source.name})") for source in config.eval.sets}
    measured, validation = [test, *sets.values()], None
    if data.validation is not None:
        where = "data.validation"
        validation = without_overlaps(load(data.validation, where), measured, where=where)
        measured.append(validation)
    sources = {}
    for number, (name, source) in enumerate(_training_sources(data).items()):
        mixed_as = name if data.mixture else None
        where = _where(name)
        split = load(source, where, mixed_as=mixed_as, first_id=number * SOURCE_STRIDE)
        sources[name] = without_overlaps(split, measured, where=where)
    weights = shares({MIXTURE_TRAIN: 1.0} | {source.name: source.weight for source in data.mixture})
    if data.mixture:
        _check_sizes(sources, weights, prompts_per_step=config.rollout.prompts_per_step)
    warm = config.run.warm_start
    return LoadedData(
        train=joined(list(sources.values())),
        validation=validation,
        test=test,
        sets=sets,
        sources=sources,
        weights=weights,
        sft=load_examples(config, maker, measured=texts(measured)) if warm else None,
    )


def load_split(reading: Reading, *, config: Config) -> LoadedSplit:
    """Load one split.

    Raises:
        DataError: as `load_data`.
    """
    columns = (*reading.maker.columns, reading.answer_column)
    rows, malformed = read_rows(
        reading.source, columns=tuple(dict.fromkeys(columns)), where=reading.where
    )
    prompts, too_long = list[Prompt](), list[int]()
    for row in rows:
        prompt = _make_prompt(row, reading)
        if isinstance(prompt, Malformed):
            malformed.append(prompt)
        elif len(prompt.tokens) > config.rollout.max_prompt_tokens:
            too_long.append(row.number)
        else:
            prompts.append(prompt)
    malformed.sort(key=lambda bad: bad.row)
    refuse_malformed(
        malformed,
        path=reading.source.path,
        where=reading.where,
        policy=config.data.malformed,
    )
    if not prompts:
        raise DataError(
            f"{reading.where}: no prompt is left: {len(malformed)} rows are malformed and "
            f"{len(too_long)} are longer than rollout.max_prompt_tokens = "
            f"{config.rollout.max_prompt_tokens}"
        )
    distinct = {(prompt.text, prompt.answer) for prompt in prompts}
    return LoadedSplit(
        prompts=tuple(prompts),
        malformed=tuple(malformed),
        too_long=tuple(too_long),
        duplicates=len(prompts) - len(distinct),
    )


def extract_reference(text: str, *, pattern: str | None) -> str | None:
    """The reference answer in the answer column's text, None if `pattern` finds none."""
    if pattern is None:
        return text.strip()
    match = re.search(pattern, text)
    answer = match.group(1) if match else None
    return answer.strip() or None if answer else None


def _make_prompt(row: Row, reading: Reading) -> Prompt | Malformed:
    column, pattern = reading.answer_column, reading.answer_pattern
    answer = extract_reference(str(row.values[column]), pattern=pattern)
    if answer is None:
        return Malformed(row.number, f"column {column!r} has no answer by the pattern {pattern!r}")
    made = reading.maker.make(row)
    if isinstance(made, Malformed):
        return made
    return Prompt(
        id=reading.first_id + row.number,
        text=made.text,
        tokens=made.tokens,
        answer=answer,
        row=row.values,
        source=reading.mixed_as,
    )


def _training_sources(data: Data) -> dict[str, Source]:
    return {MIXTURE_TRAIN: data.train} | {source.name: source for source in data.mixture}


def _where(name: str) -> str:
    """The setting that names a training source."""
    return "data.train" if name == MIXTURE_TRAIN else f"data.mixture ({name})"


def _check_sizes(
    sources: Mapping[str, LoadedSplit], weights: Mapping[str, float], *, prompts_per_step: int
) -> None:
    """Refuses a mixture whose steps would need prompts twice."""
    lines = []
    for name, split in sources.items():
        most = most_of_a_source(weights[name], prompts_per_step)
        if most > len(split.prompts):
            lines.append(
                f"{_where(name)}: its share of {weights[name]:.1%} is up to {most} of the "
                f"rollout.prompts_per_step = {prompts_per_step} prompts, and it has "
                f"{len(split.prompts)}; lower prompts_per_step or its weight"
            )
    if lines:
        raise DataError("\n".join(lines))
