"""Loads all splits and sources of a run and turns their rows into prompts.

Malformed rows are refused or reported, overlong prompts are counted and excluded (never truncated),
and training data share no prompt with evaluation data. order.py decides the order of training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from configs.errors import MistakeCollector
from configs.schema import Config, Data, NamedSource, Source
from configs.task import MIXTURE_TRAIN, HeldOut
from pipeline.data.demonstrations import load_demonstrations
from pipeline.data.order import max_per_step, normalized_weights
from pipeline.data.rows import Malformed, Row, TooLong, list_rows
from pipeline.data.sources import Columns, locate_rows, read_rows
from pipeline.data.splits import (
    EVAL_SET_PREFIX,
    MIXTURE_PREFIX,
    LoadedData,
    LoadedSplit,
    concatenate,
    hold_out,
    prompt_texts,
    repeated,
    without_overlaps,
)
from pipeline.data.text.prompts import PromptMaker, Rendered
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.types import Prompt

PROMPT_ID_STRIDE = 10**9
"""Prompt ids of a mixture's n-th source start at n times this, so ids are unique in a run."""


def answer_settings(source: Source, data: Data) -> tuple[str, str | None]:
    """Column and pattern of a source's reference answers, with those of `data` as defaults."""
    column, pattern = data.answer_column, data.answer_pattern
    if isinstance(source, NamedSource):
        column = source.answer_column or column
        pattern = pattern if source.answer_pattern is None else source.answer_pattern
    return column, pattern


def load_data(config: Config, tokenizer: Tokenizer) -> LoadedData:
    """Loads all data of a run.

    Test split and evaluation sets stay complete: their prompts are excluded from validation, and
    the prompts of all three from training sources and demonstrations.

    Raises:
        ValueError: if a source cannot be read, has malformed rows that `data.malformed` refuses,
            has no prompt left, or has fewer prompts than a step may need.
    """
    found = MistakeCollector()
    maker = PromptMaker(config.prompt, tokenizer)
    splits = found.attempt(load_splits, config, maker)
    if splits is None:
        if config.run.has_sft_phase:
            found.attempt(load_demonstrations, config, maker, measured=frozenset())
        found.raise_if_any()
    assert splits is not None
    return make_disjoint(splits, config=config, maker=maker)


def check_rows(config: Config) -> None:
    """Checks the rows of all sources as far as possible without a tokenizer.

    What needs settings that `config` lacks is left out.

    Raises:
        ValueError: if a source cannot be read, lacks a column or has malformed rows.
    """
    data, found = config.data, MistakeCollector()

    def check(name: str, source: Source, columns: Columns) -> None:
        read_rows(source, columns=columns, where=name, policy=data.malformed, make=lambda row: row)

    def prompts(template: str | None) -> Columns:
        template = template or getattr(config.prompt, "template", None)
        return Columns(()) if template is None else Columns.of_prompts(template)

    sources = [found.attempt(part, config) or {} for part in _PARTS]
    for name, source in (one for part in sources for one in part.items()):
        columns = prompts(source.template if isinstance(source, NamedSource) else None)
        answers = found.attempt(answer_settings, source, data)
        if answers is not None:
            columns = columns.with_answers(answers[0], pattern=answers[1])
        found.attempt(check, setting_name(name), source, columns)
    if config.run.has_sft_phase and config.sft.train is not None:
        columns = prompts(None)
        if hasattr(config.sft, "completion_column"):
            columns = columns.with_completions(config.sft.completion_column)
        found.attempt(check, "sft.train", config.sft.train, columns)
    found.raise_if_any()


def locate_data(config: Config) -> list[str]:
    """Says where the rows of each dataset come from, without reading all of them.

    Raises:
        ValueError: with a line for each dataset that a run cannot get.
    """
    found, sources = MistakeCollector(), _prompt_sources(config)
    if config.sft.train is not None:
        sources["sft"] = config.sft.train
    places = [
        found.attempt(locate_rows, source, where=setting_name(name))
        for name, source in sources.items()
    ]
    found.raise_if_any()
    return [place for place in dict.fromkeys(places) if place is not None]


def load_splits(config: Config, maker: PromptMaker) -> dict[str, LoadedSplit]:
    """All sources and splits by their names in `LoadedData.splits`, with overlaps.

    Raises as `load_data`.
    """
    return _load(_prompt_sources(config), config, maker)


def load_tests(config: Config, maker: PromptMaker) -> dict[str, LoadedSplit]:
    """The test split and the evaluation sets, by their names in `LoadedData.splits`.

    Raises as `load_data`.
    """
    tests = _test(config) | _sets(config)
    needed = ({MIXTURE_TRAIN: config.data.train} if config.data.test.share else {}) | tests
    loaded = _load(needed, config, maker)
    return {name: loaded[name] for name in ("test", *tests)}


def _load(
    sources: Mapping[str, Source], config: Config, maker: PromptMaker
) -> dict[str, LoadedSplit]:
    """Loads sources and splits, by their names in `LoadedData.splits`."""
    found, splits = MistakeCollector(), dict[str, LoadedSplit]()
    for name, source in sources.items():
        split = found.attempt(load_split, name, source, config=config, maker=maker)
        if split is not None:
            splits[name] = split
    found.raise_if_any()
    shares = {name: held for name, held in _held_out(config.data).items() if held.share}
    if not shares or MIXTURE_TRAIN not in splits:
        return splits
    return splits | hold_out(splits[MIXTURE_TRAIN], shares)


def make_disjoint(
    splits: Mapping[str, LoadedSplit], *, config: Config, maker: PromptMaker
) -> LoadedData:
    """Excludes the overlaps of the result of `load_splits`, and loads the demonstrations.

    Raises as `load_data`.
    """
    sets = {
        name.removeprefix(EVAL_SET_PREFIX): split
        for name, split in splits.items()
        if name.startswith(EVAL_SET_PREFIX)
    }
    measured, validation = [splits["test"], *sets.values()], None

    def disjoint(name: str) -> LoadedSplit:
        return without_overlaps(splits[name], measured, where=setting_name(name))

    if "validation" in splits:
        validation = disjoint("validation")
        measured.append(validation)
    mixture = config.data.mixture
    sources = {
        name.removeprefix(MIXTURE_PREFIX): disjoint(name) for name in _training_sources(config.data)
    }
    weights = normalized_weights(
        {MIXTURE_TRAIN: 1.0} | {source.name: source.weight for source in mixture}
    )
    if mixture:
        _check_sizes(sources, weights, prompts_per_step=config.rollout.prompts_per_step)
    sft = None
    if config.run.has_sft_phase:
        sft = load_demonstrations(config, maker, measured=prompt_texts(measured))
    return LoadedData(
        train=concatenate(list(sources.values())),
        validation=validation,
        test=splits["test"],
        sets=sets,
        sources=sources,
        weights=weights,
        sft=sft,
    )


def load_split(name: str, source: Source, *, config: Config, maker: PromptMaker) -> LoadedSplit:
    """Loads the split that has this name in `LoadedData.splits`.

    Raises as `load_data`.
    """
    most, data, where = config.rollout.max_prompt_tokens, config.data, setting_name(name)
    if isinstance(source, NamedSource):
        maker = maker.with_template(source.template)
    column, pattern = answer_settings(source, data)
    training = list(_training_sources(data))
    first_id, mixed = 0, None
    if data.mixture and name in training:
        first_id = training.index(name) * PROMPT_ID_STRIDE
        mixed = name.removeprefix(MIXTURE_PREFIX)

    def make(row: Row) -> Prompt | Malformed | TooLong:
        answer = _reference(row, column, pattern)
        made = maker.make(row)
        for one in (answer, made):
            if isinstance(one, Malformed):
                return one
        assert isinstance(made, Rendered)
        assert not isinstance(answer, Malformed)
        if len(made.tokens) > most:
            return TooLong(row.number, len(made.tokens))
        return Prompt(
            id=first_id + row.number,
            text=made.text,
            tokens=made.tokens,
            answer=answer,
            row=row.values,
            source=mixed,
            messages=row.messages,
        )

    columns = Columns.of_prompts(maker.prompt.template).with_answers(column, pattern=pattern)
    prompts, malformed, too_long = read_rows(
        source, columns=columns, where=where, policy=data.malformed, make=make
    )
    if not prompts:
        raise ValueError(
            f"{where}: no prompt of {source.title} is left: {len(malformed)} rows are malformed "
            f"and {len(too_long)} are longer than rollout.max_prompt_tokens = {most}"
            + "".join(f"\n{line}" for line in list_rows(malformed))
        )
    return LoadedSplit(tuple(prompts), malformed, too_long, repeated(prompts))


def extract_reference(text: str, *, pattern: str | None) -> str | None:
    """Extracts the reference answer from the answer column's text; None if `pattern` fails."""
    if pattern is None:
        return text.strip()
    match = re.search(pattern, text)
    answer = match.group(1) if match else None
    return answer.strip() or None if answer else None


def _reference(row: Row, column: str, pattern: str | None) -> str | Malformed | None:
    text = row.values.get(column, row.reply)
    answer = None if text is None else extract_reference(str(text), pattern=pattern)
    if answer is None and (text is not None or pattern is not None):
        where = f"column {column!r}" if column in row.values else "the last turn"
        return Malformed(row.number, f"{where} has no match of the pattern {pattern!r}")
    return answer


def _prompt_sources(config: Config) -> dict[str, Source]:
    """All sources of prompts, by the names of their splits."""
    return {name: source for part in _PARTS for name, source in part(config).items()}


def _held_out(data: Data) -> dict[str, HeldOut]:
    """The test and the validation split."""
    validation = {} if data.validation is None else {"validation": data.validation}
    return {"test": data.test} | validation


def _validation(config: Config) -> dict[str, Source]:
    """The validation split, if it is a source of its own."""
    source = config.data.validation
    return {} if source is None or source.share else {"validation": source}


def _test(config: Config) -> dict[str, Source]:
    """The test split, if it is a source of its own."""
    return {} if config.data.test.share else {"test": config.data.test}


def _sets(config: Config) -> dict[str, Source]:
    return {EVAL_SET_PREFIX + source.name: source for source in config.eval.sets}


_PARTS: tuple[Callable[[Config], dict[str, Source]], ...] = (
    lambda config: _training_sources(config.data),
    _validation,
    _test,
    _sets,
)


def _training_sources(data: Data) -> dict[str, Source]:
    return {MIXTURE_TRAIN: data.train} | {
        MIXTURE_PREFIX + source.name: source for source in data.mixture
    }


def setting_name(name: str) -> str:
    """The setting of a source or split, given its name in `LoadedData.fingerprints`."""
    if name == "sft":
        return "sft.train"
    for prefix, setting in ((MIXTURE_PREFIX, "data.mixture"), (EVAL_SET_PREFIX, "eval.sets")):
        if name.startswith(prefix):
            return f"{setting} ({name.removeprefix(prefix)})"
    return f"data.{name}"


def _check_sizes(
    sources: Mapping[str, LoadedSplit], weights: Mapping[str, float], *, prompts_per_step: int
) -> None:
    """Refuses a mixture in which a step needs more prompts of a source than it has."""
    lines = []
    for name, split in sources.items():
        most = max_per_step(weights[name], prompts_per_step)
        if most > len(split.prompts):
            where = setting_name(name if name == MIXTURE_TRAIN else MIXTURE_PREFIX + name)
            lines.append(
                f"{where}: its share of {weights[name]:.1%} is up to {most} of the "
                f"rollout.prompts_per_step = {prompts_per_step} prompts, but it has only "
                f"{len(split.prompts)}; lower prompts_per_step or its weight"
            )
    if lines:
        raise ValueError("\n".join(lines))
