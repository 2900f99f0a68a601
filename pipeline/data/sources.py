"""Reads the rows of a split, from a file or from the hub.

Every malformed row is reported with its number and reason. Independent of prompts. The first read
imports `datasets`, which is slow; importing this module is fast.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

import numpy as np

from configs.base import nearest_hint
from configs.schema import Source
from configs.task import ANSWER_COLUMN, FILE_SLICE
from pipeline.data.models.model_source import ask_hub
from pipeline.data.rows import (
    Malformed,
    Row,
    TooLong,
    chat_of_text,
    clean_row,
    is_chat,
    refuse_malformed,
    value_at,
)
from pipeline.data.text.chat import check_columns, sole_column, template_columns
from pipeline.data.text_files import Parser, parser_of

T = TypeVar("T")


@dataclass(frozen=True)
class Columns:
    """Columns of a dataset whose values are text or numbers.

    Attributes:
        required: columns that it must have.
        chat: that one of `required` which may be in chat format, in all rows.
        required_in_chat: columns that a dataset in chat format must have.
        optional: further columns that are checked if it has them.
    """

    required: tuple[str, ...]
    chat: str | None = None
    required_in_chat: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @staticmethod
    def of_prompts(template: str) -> Columns:
        """The columns of `prompt.template`."""
        return Columns(template_columns(template), sole_column(template))

    def with_completions(self, column: str) -> Columns:
        """With a column that the last turn may replace in chat format."""
        required, optional = (*self.required, column), (*self.optional, column)
        return replace(self, required=required, optional=optional)

    def with_answers(self, column: str, *, pattern: str | None) -> Columns:
        """With the column of the reference answers, which a dataset may lack if it is the default.

        A pattern needs answers: then only the last turn may replace the column.
        """
        if column != ANSWER_COLUMN:
            required, in_chat = (*self.required, column), (*self.required_in_chat, column)
            return replace(self, required=required, required_in_chat=in_chat)
        if pattern is not None:
            return self.with_completions(column)
        return replace(self, optional=(*self.optional, column))


def read_rows(
    source: Source,
    *,
    columns: Columns,
    where: str,
    policy: Literal["refuse", "skip"],
    make: Callable[[Row], T | Malformed | TooLong],
) -> tuple[list[T], tuple[Malformed, ...], tuple[TooLong, ...]]:
    """Reads the rows of `source` and makes something of each.

    `where` is the setting that names the source, for messages, and `policy` is `data.malformed`.

    Returns:
        The results of `make` in the source's order, the malformed and the overlong rows.

    Raises:
        ValueError: if the source cannot be read, has no rows, or lacks a required column; or if
            there are malformed rows and `policy` refuses them.
    """
    parser = parser_of(source.title) if source.is_file else None
    malformed = list[Malformed]()
    if parser is not None:
        raw, malformed = _parse(source, parser, where=where)
    else:
        raw = _load(source, where=where)
    if not raw and not malformed:
        raise ValueError(f"{where}: {source.title} has no rows")
    raw = [_with_nested(row, columns) for row in raw]
    chat = columns.chat
    if chat is not None:
        read = [chat_of_text(row.values.get(chat)) for row in raw]
        if read and all(map(is_chat, read)):
            raw = [
                replace(row, values={**row.values, chat: messages})
                for row, messages in zip(raw, read, strict=True)
            ]
        elif not any(is_chat(row.values.get(chat)) for row in raw):
            chat = None
    present = dict.fromkeys(name for row in raw for name in row.values)
    required = columns.required if chat is None else columns.required_in_chat
    if raw:
        try:
            names = [*present, *_nested_names(raw[0])]
            check_columns(required, present=names, where=f"{where}: {source.title}")
        except ValueError as error:
            raise ValueError(f"{error}{_template_hint(raw[0], required)}") from None
    optional = (name for name in columns.optional if name in present)
    texts = [name for name in dict.fromkeys([*required, *optional]) if name != chat]
    cleaned = [clean_row(row, columns=texts, chat=chat) for row in raw]
    rows = [row for row in cleaned if isinstance(row, Row)]
    if parser is not None:  # a missing column is None, as in other sources
        rows = [replace(row, values={n: row.values.get(n) for n in present}) for row in rows]
    made = [make(row) for row in rows]
    malformed += [row for row in (*cleaned, *made) if isinstance(row, Malformed)]
    malformed.sort(key=lambda bad: bad.row)
    refuse_malformed(malformed, path=source.title, where=where, policy=policy)
    too_long = tuple(one for one in made if isinstance(one, TooLong))
    usable = [one for one in made if not isinstance(one, Malformed | TooLong)]
    return usable, tuple(malformed), too_long


def locate_rows(source: Source, *, where: str) -> str:
    """Says where the rows of `source` come from, without reading all of them.

    Raises:
        ValueError: if there is no such file or dataset, or a run cannot get it.
    """
    from huggingface_hub import errors

    if source.is_file:
        return f"{_existing(source, where=where)} exists"
    assert source.path is not None
    try:
        ask_hub(source.path, kind="dataset")
    except errors.LocalEntryNotFoundError as error:
        try:
            _datasets().load.CachedDatasetModuleFactory(source.path).get_module()
        except FileNotFoundError:
            unreachable = ConnectionError(*error.args)
            raise ValueError(_explain(unreachable, source=source, where=where)) from error
        return f"{source.path} is in the cache"
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise ValueError(_explain(error, source=source, where=where)) from error
    return f"{source.path} is on the hub, which can be reached"


def _nested_names(row: Row) -> Iterator[str]:
    """Names of the values in objects: `column.key`."""
    for name, value in row.values.items():
        yield from (f"{name}.{key}" for key in value) if isinstance(value, Mapping) else ()


def _with_nested(row: Row, columns: Columns) -> Row:
    """The row, with the values in objects that `columns` names, such as `reward_model.answer`."""
    names = (*columns.required, *columns.required_in_chat, *columns.optional)
    nested = {name: value_at(row.values, name) for name in names if name not in row.values}
    found = {name: value for name, value in nested.items() if value is not None}
    return replace(row, values={**row.values, **found}) if found else row


def _parse(source: Source, parser: Parser, *, where: str) -> tuple[list[Row], list[Malformed]]:
    path = _existing(source, where=where)
    try:
        rows, malformed = parser(path, None if source.split else source.limit)
    except ValueError as error:
        raise ValueError(f"{where}.path: {path}: {error}") from None
    if source.split is None:
        return rows, malformed
    numbers = sorted([row.number for row in rows] + [bad.row for bad in malformed])
    kept = set(_sliced(numbers, source.split)[: source.limit])
    return [row for row in rows if row.number in kept], [b for b in malformed if b.row in kept]


def _sliced(numbers: Sequence[int], split: str) -> Sequence[int]:
    """The slice of a file's rows that a split such as `train[-10%:]` names."""
    found = FILE_SLICE.fullmatch(split)
    assert found is not None
    first, end = (
        round(len(numbers) * int(text[:-1]) / 100) if text.endswith("%") else int(text or 0)
        for text in found.groups(default="")
    )
    return numbers[first : end if found[2] else None]


def _load(source: Source, *, where: str) -> list[Row]:
    """Reads a Parquet file or a hub dataset."""
    path = str(_existing(source, where=where)) if source.is_file else source.path
    datasets = _datasets()
    with TemporaryDirectory() as cache:
        try:
            if source.is_file:
                dataset = datasets.load_dataset(
                    "parquet",
                    data_files=path,
                    split=source.split or "train",
                    cache_dir=cache,
                    keep_in_memory=True,
                )
            else:
                dataset = datasets.load_dataset(path, source.subset, split=source.split)
        except Exception as error:  # the hub clients' errors have no common base class
            raise ValueError(_explain(error, source=source, where=where)) from error
        count = len(dataset) if source.limit is None else min(source.limit, len(dataset))
        kinds = dataset.features.items()
        short = [name for name, kind in kinds if getattr(kind, "dtype", None) == "float32"]
        return [
            Row(n, {**values, **{name: _shortest(values[name]) for name in short}})
            for n, values in enumerate(dataset.select(range(count)), start=1)
        ]


def _shortest(value: float | None) -> float | None:
    """A number of 32 bits as its shortest decimal: 0.1, not 0.10000000149011612."""
    return None if value is None else float(str(np.float32(value)))


def _template_hint(row: Row, required: Sequence[str]) -> str:
    """The setting for rows in chat format or without `question`, for the end of a message."""
    for column, value in row.values.items():
        if is_chat(value):
            return f'; {column!r} is in chat format: set prompt.template = "{{{column}}}"'
    if "question" in required and "question" not in row.values:
        return '; prompt.template names the columns of a prompt, "{question}" by default'
    return ""


def _existing(source: Source, *, where: str) -> Path:
    path = Path(source.title)
    if path.is_file():
        return path
    raise ValueError(f"{where}.path: no file {path}{nearest_hint(path)}")


def _explain(error: Exception, *, source: Source, where: str) -> str:
    """One sentence on why a dataset cannot be loaded."""
    what = " ".join(str(error).split()) or type(error).__name__
    if source.is_file:
        return f"{where}.path: {source.path} is not a readable Parquet file: {what}"
    if isinstance(error, ConnectionError):
        return (
            f"{where}: the hub cannot be reached for {source.path!r} ({what}); connect to the "
            "network, or download the dataset and set path to its file"
        )
    named = f"{source.path!r} (subset {source.subset!r}, split {source.split!r})"
    if "gated" in what:
        return f"{where}: {named} is gated: accept its terms on the hub, then `hf auth login`"
    return f"{where}: the hub cannot load {named}: {what}"


def _datasets() -> Any:
    """The `datasets` package, without progress bars and its own messages on errors."""
    import datasets  # late: the import takes seconds

    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    return datasets
