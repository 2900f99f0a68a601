"""From dataset rows to prompts: all splits and sources as the model will see them.

Rows that cannot be used are refused or reported, over-long prompts are counted and left out (never
cut), and what is learned from stands in nothing that is measured. Order is not decided here (see
order.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from configs.errors import Refusals
from configs.schema import Config, Data, NamedSource, Source
from configs.task import MIXTURE_TRAIN
from pipeline.contracts.rollouts import Prompt
from pipeline.inputs.dataset.demonstrations import load_examples
from pipeline.inputs.dataset.order import most_of_a_source, shares
from pipeline.inputs.dataset.rows import DataError, Malformed, Row, TooLong, refuse_malformed
from pipeline.inputs.dataset.sources import read_rows
from pipeline.inputs.dataset.splits import (
    MIXED,
    SETS,
    LoadedData,
    LoadedSplit,
    joined,
    texts,
    without_overlaps,
)
from pipeline.inputs.text.chat import template_columns
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.inputs.text.tokenizer import Tokenizer

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
    found = Refusals()
    maker = PromptMaker(config.prompt, tokenizer)
    splits = found.attempt(load_splits, config, maker)
    if splits is None:
        if config.run.warm_start:
            found.attempt(load_examples, config, maker, measured=frozenset())
        found.refuse(DataError)
    assert splits is not None
    return separate(splits, config=config, maker=maker)


def check_rows(config: Config, *, intact: Callable[..., bool]) -> None:
    """Reads everything that a run reads, as far as that needs no tokenizer.

    Args:
        config: what is read.
        intact: whether a setting's value is the user's; what is not is left out.

    Raises:
        DataError: if a source cannot be read, lacks a column or has malformed rows.
    """
    data, found = config.data, Refusals()
    named = _training_sources(data) | _tests(config)
    sources = {setting_of(name): (source, data.answer_column) for name, source in named.items()}
    if data.validation is not None:
        sources["data.validation"] = data.validation, data.answer_column
    if config.sft.train is not None:
        sources["sft.train"] = config.sft.train, config.sft.completion_column
    for where, (source, default) in sources.items():
        template, column = None, None
        if isinstance(source, NamedSource):
            template, column = source.template, source.answer_column
        columns = list[str]()
        if template is not None or intact("prompt.template"):
            columns += template_columns(template or config.prompt.template)
        if column is not None or intact("data.answer_column", "sft.completion_column"):
            columns.append(column or default)
        if intact(where.partition(" ")[0]):
            found.attempt(_check_source, source, columns, where=where, config=config)
    found.refuse(DataError)


def _check_source(source: Source, columns: Sequence[str], *, where: str, config: Config) -> None:
    _, malformed = read_rows(source, columns=tuple(dict.fromkeys(columns)), where=where)
    refuse_malformed(malformed, path=source.path, where=where, policy=config.data.malformed)


def load_splits(config: Config, maker: PromptMaker) -> dict[str, LoadedSplit]:
    """All training sources and splits by their names in `LoadedData.splits`, overlaps and all.

    Raises:
        DataError: as `load_data`.
    """
    data, found = config.data, Refusals()
    splits = dict[str, LoadedSplit | None]()
    for number, (name, source) in enumerate(_training_sources(data).items()):
        reading = Reading.of(source, where=setting_of(name), config=config, maker=maker)
        mixed = replace(
            reading,
            mixed_as=name.removeprefix(MIXED) if data.mixture else None,
            first_id=number * SOURCE_STRIDE,
        )
        splits[name] = found.attempt(load_split, mixed, config=config)
    if data.validation is not None:
        reading = Reading.of(data.validation, where="data.validation", config=config, maker=maker)
        splits["validation"] = found.attempt(load_split, reading, config=config)
    tests = found.attempt(load_tests, config, maker) or {}
    found.refuse(DataError)
    return {name: split for name, split in splits.items() if split is not None} | tests


def load_tests(config: Config, maker: PromptMaker) -> dict[str, LoadedSplit]:
    """The test split and the evaluation sets, by their names in `LoadedData.splits`.

    Raises:
        DataError: as `load_data`.
    """
    found, splits = Refusals(), dict[str, LoadedSplit | None]()
    for name, source in _tests(config).items():
        reading = Reading.of(source, where=setting_of(name), config=config, maker=maker)
        splits[name] = found.attempt(load_split, reading, config=config)
    found.refuse(DataError)
    return {name: split for name, split in splits.items() if split is not None}


def separate(
    splits: Mapping[str, LoadedSplit], *, config: Config, maker: PromptMaker
) -> LoadedData:
    """What `load_splits` returned, without overlaps, and the worked examples if there are any.

    Raises:
        DataError: as `load_data`.
    """
    sets = {n.removeprefix(SETS): split for n, split in splits.items() if n.startswith(SETS)}
    measured, validation = [splits["test"], *sets.values()], None
    if "validation" in splits:
        validation = without_overlaps(splits["validation"], measured, where="data.validation")
        measured.append(validation)
    mixture = config.data.mixture
    sources = {
        name.removeprefix(MIXED): without_overlaps(splits[name], measured, where=setting_of(name))
        for name in _training_sources(config.data)
    }
    weights = shares({MIXTURE_TRAIN: 1.0} | {source.name: source.weight for source in mixture})
    if mixture:
        _check_sizes(sources, weights, prompts_per_step=config.rollout.prompts_per_step)
    warm = config.run.warm_start
    return LoadedData(
        train=joined(list(sources.values())),
        validation=validation,
        test=splits["test"],
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
    prompts, too_long = list[Prompt](), list[TooLong]()
    for row in rows:
        prompt = _make_prompt(row, reading)
        if isinstance(prompt, Malformed):
            malformed.append(prompt)
        elif len(prompt.tokens) > config.rollout.max_prompt_tokens:
            too_long.append(TooLong(row.number, len(prompt.tokens)))
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


def _tests(config: Config) -> dict[str, Source]:
    return {"test": config.data.test} | {SETS + source.name: source for source in config.eval.sets}


def _training_sources(data: Data) -> dict[str, Source]:
    return {MIXTURE_TRAIN: data.train} | {MIXED + source.name: source for source in data.mixture}


def setting_of(name: str) -> str:
    """The setting that a source or split comes from, by its name in `LoadedData.fingerprints`."""
    if name == "sft":
        return "sft.train"
    for prefix, setting in ((MIXED, "data.mixture"), (SETS, "eval.sets")):
        if name.startswith(prefix):
            return f"{setting} ({name.removeprefix(prefix)})"
    return f"data.{name}"


def _check_sizes(
    sources: Mapping[str, LoadedSplit], weights: Mapping[str, float], *, prompts_per_step: int
) -> None:
    """Refuses a mixture whose steps would need prompts twice."""
    lines = []
    for name, split in sources.items():
        most = most_of_a_source(weights[name], prompts_per_step)
        if most > len(split.prompts):
            where = setting_of(name if name == MIXTURE_TRAIN else MIXED + name)
            lines.append(
                f"{where}: its share of {weights[name]:.1%} is up to {most} of the "
                f"rollout.prompts_per_step = {prompts_per_step} prompts, and it has "
                f"{len(split.prompts)}; lower prompts_per_step or its weight"
            )
    if lines:
        raise DataError("\n".join(lines))
