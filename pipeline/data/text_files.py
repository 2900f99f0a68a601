"""Parses data files that are text, row by row: JSONL, JSON, CSV and TSV, also with gzip.

Malformed rows are reported with their numbers. Independent of columns and their types.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from pipeline.data.rows import Malformed, Row, is_unicode, kind_of

_LONGEST_FIELD = 2**31 - 1
"""Characters of a CSV value; the default of the module `csv` is 131,072."""
_GZIP, _GZIP_MAGIC = ".gz", b"\x1f\x8b"

Parsed = tuple[list[Row], list[Malformed]]
"""The rows and the malformed ones."""
Parser = Callable[[Path, int | None], Parsed]
"""Parses at most a number of rows of a file; None: all. Raises ValueError for unusable files."""


def parse_jsonl(path: Path, limit: int | None) -> Parsed:
    """Parses one JSON object per line; the numbers are line numbers, blank lines are skipped.

    `limit` is the maximum number of rows to read, malformed ones included.
    """
    rows, malformed = list[Row](), list[Malformed]()
    content = _read_bytes(path)
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        if len(rows) + len(malformed) == limit:
            break
        try:
            value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError:
            malformed.append(Malformed(number, "not UTF-8"))
        except (ValueError, RecursionError) as error:
            malformed.append(Malformed(number, f"not JSON: {error}"))
        else:
            _add(value, number, rows, malformed)
    if malformed and not rows and content.lstrip(codecs.BOM_UTF8 + b" \r\n").startswith(b"["):
        raise ValueError("a JSON list, not one object per line; call the file .json")
    return rows, malformed


def parse_json(path: Path, limit: int | None) -> Parsed:
    """Parses a JSON list of objects; as `parse_jsonl`, with positions from 1 as numbers.

    Raises:
        ValueError: also if the file is not a JSON list.
    """
    content = _read_bytes(path)
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start}); convert it") from None
    except (ValueError, RecursionError) as error:
        hint = "a file with one object per line is called .jsonl"
        raise ValueError(f"not a JSON list: {error}; {hint}") from None
    if not isinstance(values, list):
        raise ValueError(f"{kind_of(values)}, not a list of objects")
    rows, malformed = list[Row](), list[Malformed]()
    for number, value in enumerate(values[:limit], start=1):
        _add(value, number, rows, malformed)
    return rows, malformed


def parse_csv(path: Path, limit: int | None, *, separator: str = ",") -> Parsed:
    """Parses separated values below a line of column names (RFC 4180); all are text.

    As `parse_jsonl`; the number of a row is that of its first line. Rows without any text are
    skipped, as is a first column without a name, in which pandas writes its index.

    Raises:
        ValueError: also if the file has another separator, two columns share a name, another column
            has none, or a quote is never closed: what follows it would be one value.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    # Bytes that are not UTF-8 become surrogates, so that their rows are found.
    text = _read_bytes(path).decode("utf-8-sig", errors="surrogateescape")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    names: list[str] | None = None
    rows, malformed = list[Row](), list[Malformed]()
    while limit is None or len(rows) + len(malformed) < limit:
        number = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            if "unexpected end" in str(error):
                what = f"a quote in the row of line {number} is never closed"
                raise ValueError(f'{what}; close it, or write "" for a quote in a value') from None
            malformed.append(Malformed(number, f"not CSV: {error}"))
            continue
        if not any(map(str.strip, values)):
            continue
        if names is None:
            names = _column_names(values, separator)
        elif len(values) != len(names):
            what = f"has {len(values)} values for {len(names)} columns"
            malformed.append(Malformed(number, what))
        elif not all(map(is_unicode, values)):
            malformed.append(Malformed(number, "not UTF-8"))
        else:
            named = dict(zip(names, values, strict=True))
            rows.append(Row(number, {name: value for name, value in named.items() if name}))
    return rows, malformed


PARSERS: Mapping[str, Parser] = {
    ".jsonl": parse_jsonl,
    ".ndjson": parse_jsonl,
    ".json": parse_json,
    ".csv": parse_csv,
    ".tsv": partial(parse_csv, separator="\t"),
}
"""Parser by the ending of the file in lower case, without `.gz`."""


def parser_of(path: str) -> Parser | None:
    """The parser of a file by its name; None if it is not a text file."""
    return PARSERS.get(Path(path.lower().removesuffix(_GZIP)).suffix)


def _read_bytes(path: Path) -> bytes:
    """The file's bytes, decompressed if they are gzip; ValueError if it is damaged, or UTF-16."""
    content = path.read_bytes()
    if content.startswith(_GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"not gzip: {error}") from None
    # In UTF-16 one of the two bytes of the first character is zero, unless a mark precedes it.
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content[:2]:
        raise ValueError("UTF-16, not UTF-8; convert it, e.g. with iconv -f UTF-16 -t UTF-8")
    return content


def _add(value: object, number: int, rows: list[Row], malformed: list[Malformed]) -> None:
    if isinstance(value, dict):
        rows.append(Row(number, value))
    else:
        malformed.append(Malformed(number, f"{kind_of(value)}, not an object with columns"))


def _column_names(values: list[str], separator: str) -> list[str]:
    names = [value.strip() for value in values]
    marks = ";\t|,".replace(separator, "")
    other = next((mark for mark in marks if len(names) == 1 and mark in names[0]), None)
    if other is not None:
        endings = {"\t": "call the file .tsv", ",": "call the file .csv"}
        advice = endings.get(other, "write commas or tabs")
        raise ValueError(f"the separator is {other!r} instead of {separator!r}; {advice}")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if "" in names[1:]:
        raise ValueError(f"the first line has an empty column name: {names}")
    if repeated:
        raise ValueError(f"the first line repeats the column names {', '.join(repeated)}")
    return names
