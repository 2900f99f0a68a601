"""Reads the rows of a split: from a JSONL or Parquet file, from the hub, or of reasoning-gym.

Every malformed row is reported with its number and reason. Independent of prompts. The first read
imports `datasets`, which is slow; importing this module is fast.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

from configs.schema import Source
from pipeline.inputs.dataset.procedural import generate_rows
from pipeline.inputs.dataset.rows import (
    DataError,
    Malformed,
    Row,
    TooLong,
    clean_row,
    refuse_malformed,
)
from pipeline.inputs.text.chat import check_columns

T = TypeVar("T")


def read_rows(
    source: Source,
    *,
    columns: Sequence[str],
    where: str,
    policy: Literal["refuse", "skip"],
    make: Callable[[Row], T | Malformed | TooLong],
) -> tuple[list[T], tuple[Malformed, ...], tuple[TooLong, ...]]:
    """Reads the rows of `source` and makes something of each.

    Args:
        source: the dataset.
        columns: required columns, with text or numbers; their values become text.
        where: the setting that names the source, for error messages.
        policy: `data.malformed`.
        make: what a row becomes.

    Returns:
        The results of `make` in the source's order, the malformed rows by number, and the overlong
        ones.

    Raises:
        DataError: if the source cannot be read, has no rows, or lacks one of `columns`; or if there
            are malformed rows and `policy` refuses them.
    """
    is_jsonl = source.is_file and source.title.endswith(".jsonl")
    if is_jsonl:
        raw, malformed = parse_jsonl(_existing(source, where=where), limit=source.limit)
    else:
        raw, malformed = (_generate if source.reasoning_gym else _load)(source, where=where), []
    if not raw and not malformed:
        raise DataError(f"{where}: {source.title} has no rows")
    columns = tuple(dict.fromkeys(columns))
    if raw:
        present = {name for row in raw for name in row.values}
        try:
            check_columns(columns, present=present, where=f"{where}: {source.title}")
        except ValueError as error:
            raise DataError(str(error)) from None
    cleaned = [clean_row(row, columns=columns) for row in raw]
    rows = [row for row in cleaned if isinstance(row, Row)]
    made = [make(row) for row in (_through_datasets(rows) if is_jsonl and rows else rows)]
    malformed += [row for row in (*cleaned, *made) if isinstance(row, Malformed)]
    malformed.sort(key=lambda bad: bad.row)
    refuse_malformed(malformed, path=source.title, where=where, policy=policy)
    too_long = tuple(one for one in made if isinstance(one, TooLong))
    usable = [one for one in made if not isinstance(one, Malformed | TooLong)]
    return usable, tuple(malformed), too_long


def parse_jsonl(path: Path, *, limit: int | None) -> tuple[list[Row], list[Malformed]]:
    """Parses a file line by line, so that malformed lines are reported; blank lines are skipped.

    Args:
        path: the file.
        limit: maximum number of rows to read, including malformed ones.
    """
    rows, malformed = list[Row](), list[Malformed]()
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        if limit is not None and len(rows) + len(malformed) == limit:
            break
        try:
            value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError:
            malformed.append(Malformed(number, "not UTF-8"))
        except (ValueError, RecursionError) as error:
            malformed.append(Malformed(number, f"not JSON: {error}"))
        else:
            if isinstance(value, dict):
                rows.append(Row(number, value))
            else:
                kind = type(value).__name__
                malformed.append(Malformed(number, f"a {kind}, not an object with columns"))
    return rows, malformed


def _generate(source: Source, *, where: str) -> list[Row]:
    """Generates the rows of a dataset of reasoning-gym."""
    name, size, seed = source.reasoning_gym, source.size, source.seed
    assert name is not None
    assert size is not None
    assert seed is not None
    try:
        rows = generate_rows(name, size=size, seed=seed, settings=source.settings)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    return [Row(number, values) for number, values in enumerate(rows, start=1)]


def _load(source: Source, *, where: str) -> list[Row]:
    """Reads a Parquet file or a hub dataset."""
    path = str(_existing(source, where=where)) if source.is_file else source.path
    with _quiet_datasets() as datasets, TemporaryDirectory() as cache:
        try:
            if source.is_file:
                dataset = datasets.load_dataset(
                    "parquet", data_files=path, split="train", cache_dir=cache, keep_in_memory=True
                )
            else:
                dataset = datasets.load_dataset(path, source.subset, split=source.split)
        except Exception as error:  # the hub clients' errors have no common base class
            raise DataError(_explain(error, source=source, where=where)) from error
        count = len(dataset) if source.limit is None else min(source.limit, len(dataset))
        return [Row(n, values) for n, values in enumerate(dataset.select(range(count)), start=1)]


def _through_datasets(rows: Sequence[Row]) -> list[Row]:
    """Converts rows as `datasets` does, so that JSONL files give the same rows as other sources.

    Missing columns become None. A column whose values have no common Arrow type becomes JSON text.
    """
    with _quiet_datasets() as datasets:
        names = dict.fromkeys(name for row in rows for name in row.values)
        columns = {name: [row.values.get(name) for row in rows] for name in names}
        for name, values in columns.items():
            try:
                datasets.Dataset.from_dict({name: values})
            except (TypeError, ValueError, OverflowError):
                columns[name] = [None if v is None else json.dumps(v) for v in values]
        dataset = datasets.Dataset.from_dict(columns)
        return [Row(row.number, v) for row, v in zip(rows, dataset, strict=True)]


def _existing(source: Source, *, where: str) -> Path:
    path = Path(source.title)
    if path.is_file():
        return path
    beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, beside, n=1)
    hint = f"; nearest: {path.parent / nearest[0]}" if nearest else ""
    raise DataError(f"{where}.path: no file {source.path}{hint}")


def _explain(error: Exception, *, source: Source, where: str) -> str:
    """One sentence on why a dataset cannot be loaded."""
    what = " ".join(str(error).split()) or type(error).__name__
    if source.is_file:
        return f"{where}.path: {source.path} is not a readable Parquet file: {what}"
    if isinstance(error, ConnectionError):
        return (
            f"{where}: the hub cannot be reached for {source.path!r} ({what}); connect to the "
            "network, or download the dataset and set path to its .jsonl or .parquet file"
        )
    named = f"{source.path!r} (subset {source.subset!r}, split {source.split!r})"
    if "gated" in what:
        return f"{where}: {named} is gated: accept its terms on the hub, then `hf auth login`"
    return f"{where}: the hub cannot load {named}: {what}"


@contextmanager
def _quiet_datasets() -> Iterator[Any]:
    """The `datasets` package, with progress bars and the hub's retry messages disabled."""
    import datasets  # late: the import takes seconds

    had_bars = not datasets.are_progress_bars_disabled()
    hub_log = logging.getLogger("huggingface_hub")
    level = hub_log.level
    datasets.disable_progress_bars()
    hub_log.setLevel(logging.ERROR)
    try:
        yield datasets
    finally:
        hub_log.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()
