"""Reads and writes the record files of a run.

    write_json, read_json    one JSON object, replaced atomically
    append_row, read_rows    JSONL, appended and flushed
    write_rows               JSONL, replaced atomically

A process that is killed leaves at most an unfinished last line, which the next append drops. A
folder is replaced as a whole by `replace_folder`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""Of time stamps, in UTC."""
RESTORE = "restore the file from a copy, or start another run with --run.name"
"""The remedy where a file of a run cannot be read."""


class DamagedFileError(ValueError):
    """A file of a run is missing or does not parse."""


def write_atomically(path: Path, text: bytes) -> None:
    """Replaces a file; a reader sees either the old or the new content.

    Raises:
        OSError: naming the file, which is unchanged.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise unwritten(path, error) from None


def unwritten(path: Path, error: Exception) -> OSError:
    """The error of a write with the file's name, which Python and TensorStore may leave out."""
    code = getattr(error, "errno", None) or errno.EIO
    code = errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else code
    return OSError(code, os.strerror(code), str(path))


def replace_folder(folder: Path, fresh: Path) -> None:
    """Replaces a folder by a complete one beside it, of the same file system.

    A process that dies between the two renames leaves the old content in `.NAME.replaced`, from
    where `recover_folder` restores it.
    """
    recover_folder(folder)
    aside = _aside(folder)
    if folder.exists():
        folder.rename(aside)
    fresh.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Completes or undoes a `replace_folder` that was interrupted."""
    aside = _aside(folder)
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
    elif aside.exists():
        aside.rename(folder)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def write_json(path: Path, value: Row) -> None:
    """Replaces a file by a JSON object."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads the object that `write_json` wrote, or raises `DamagedFileError`; None: no file."""
    return _object(path.read_bytes(), str(path)) if path.is_file() else None


def time_stamp() -> str:
    """The time now, as rows have it."""
    return time.strftime(TIME_FORMAT, time.gmtime())


def append_row(path: Path, row: Row) -> None:
    """Appends an object as one line; drops an unfinished last line of a killed process.

    Raises:
        OSError: naming the file, which has at most an unfinished line more.
    """
    try:
        with path.open("ab+") as file:
            if end := file.tell():
                file.seek(end - 1)
                if file.read() != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write(_line(row))
    except OSError as error:
        raise unwritten(path, error) from None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the objects of a JSONL file, none if there is no file; ignores an unfinished last line.

    Raises:
        DamagedFileError: if a line is not a JSON object.
    """
    if not path.is_file():
        return
    # Not `splitlines`, which also splits at U+2028 and other characters that strings may contain.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        yield _object(line, f"{path}, line {number}")


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replaces a file by one line for each object."""
    write_atomically(path, b"".join(map(_line, rows)))


def supersede_rows(path: Path, rows: Iterable[Row]) -> None:
    """Appends rows that a resume leaves behind to `NAME.superseded.jsonl`."""
    for row in rows:
        append_row(path.with_suffix(".superseded.jsonl"), row)


def _object(text: bytes, place: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    raise DamagedFileError(f"{place}: not a JSON object; {RESTORE}")


def _line(row: Row) -> bytes:
    """The object as a line of UTF-8 JSON; lone surrogates, which UTF-8 lacks, are escaped."""
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
