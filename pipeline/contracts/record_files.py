"""Reads and writes the record files of a run, with checksums that detect damage.

    write_json, read_json    one JSON object, replaced atomically; its last key, `sha256`, is its
                             hash
    append_row, read_rows    JSONL, appended; the last key of each line, `crc32`, is the checksum
                             of this line and all lines before it
    write_rows, FileDigest   JSONL, replaced atomically; row count and hash are stored elsewhere

Records that a resume rolls back are moved, not deleted: `move_to_superseded`. A folder is replaced
as a whole by `replace_folder`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""Of time stamps, in UTC."""
_CHECKED_LINE = re.compile(rb'(?P<row>\{.*), "crc32": "(?P<crc32>[0-9a-f]{8})"\}', re.DOTALL)


_TAIL_BYTES = 2**20
"""Size of the end of a file that is searched first for its last line."""


class DamagedFileError(ValueError):
    """The content of a file differs from what was written."""


@dataclass(frozen=True)
class FileDigest:
    """Line count and hash of a JSONL file.

    Attributes:
        rows: number of lines.
        sha256: hash of all bytes.
    """

    rows: int
    sha256: str

    def read(self, path: Path) -> list[dict[str, Any]]:
        """Reads the objects of a file with this digest.

        Raises:
            DamagedFileError: if the file is missing or has another digest.
        """
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise DamagedFileError(f"{path} is missing") from None
        if hashlib.sha256(text).hexdigest() != self.sha256:
            found = text.count(b"\n")
            raise DamagedFileError(
                f"{path} is damaged: it has {found} lines, but {self.rows} were written"
                if found != self.rows
                else f"{path} is damaged: its content has changed since it was written"
            )
        return _parse_lines(text.split(b"\n")[:-1])


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
    """Replaces a file by a JSON object with its hash as the last key."""
    write_atomically(path, encode_json(value))


def encode_json(value: Row) -> bytes:
    """A JSON object as text with its hash as the last key."""
    plain = json.loads(json.dumps(value))  # as a reader parses it: keys are strings
    return (json.dumps({**plain, "sha256": _sha256(plain)}, indent=2) + "\n").encode()


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads the object that `write_json` wrote; None if there is no file.

    Raises:
        DamagedFileError: if the content does not match its hash.
    """
    return decode_json(path.read_bytes(), str(path)) if path.is_file() else None


def decode_json(text: bytes, name: str) -> dict[str, Any]:
    """Reads the object that `encode_json` wrote to the file `name`.

    Raises:
        DamagedFileError: if the content does not match its hash.
    """
    try:
        value: dict[str, Any] = json.loads(text)
        if value.pop("sha256") == _sha256(value):
            return value
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise DamagedFileError(f"{name} is damaged: its content does not match its sha256")


def encode_seconds(seconds: float) -> bytes:
    """A time with its checksum, of fixed width: a single write replaces an older one."""
    text = b"%016.3f" % seconds
    return b"%b %08x\n" % (text, zlib.crc32(text))


def decode_seconds(written: bytes) -> float:
    """The time that `encode_seconds` wrote; 0 if it is damaged."""
    text = written.partition(b" ")[0]
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return seconds if encode_seconds(seconds) == written else 0.0


def time_stamp() -> str:
    """The time now, as rows have it."""
    return time.strftime(TIME_FORMAT, time.gmtime())


def append_row(path: Path, row: Row) -> None:
    """Appends an object as one line; replaces an incomplete last line of a killed process.

    Raises:
        OSError: naming the file, which has at most an incomplete line more.
    """
    try:
        _append(path, row)
    except OSError as error:
        raise unwritten(path, error) from None


def _append(path: Path, row: Row) -> None:
    with path.open("ab+") as file:
        end = file.tell()
        file.seek(max(0, end - _TAIL_BYTES))
        tail = file.read()
        if end > _TAIL_BYTES and tail.count(b"\n") < 2:
            file.seek(0)
            tail = file.read()
        complete, _, incomplete = tail.rpartition(b"\n")
        if incomplete:
            file.truncate(end - len(incomplete))
        file.write(_checked_line(row, after=_crc_of(complete.rpartition(b"\n")[2])))


def replace_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replaces a file by these objects, in the format of `append_row`."""
    lines, crc = [], 0
    for row in rows:
        lines.append(_checked_line(row, after=crc))
        crc = _crc_of(lines[-1].rstrip(b"\n"))
    write_atomically(path, b"".join(lines))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the objects that `append_row` wrote; ignores an incomplete last line.

    Raises:
        DamagedFileError: if a line does not match its checksum.
    """
    for number, row in enumerate(_checked_rows(path), start=1):
        if row is None:
            raise DamagedFileError(
                f"{path}, line {number}: checksum mismatch: the line is damaged, earlier lines are "
                "missing, or an earlier version wrote it; restore the file from a copy, or start "
                "another run with --run.name"
            )
        yield row


def readable_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects that `append_row` wrote, without damaged lines; for uses without decisions.

    Returns:
        The rows, and the numbers of the lines whose checksum does not match.
    """
    rows = list(_checked_rows(path))
    damaged = [number for number, row in enumerate(rows, start=1) if row is None]
    return [row for row in rows if row is not None], damaged


def _checked_rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each line's object; None if it does not match its checksum. Ends before an incomplete line.

    A line is checked with the checksum that the line before it states.
    """
    if not path.is_file():
        return
    # Not `splitlines`, which also splits at U+2028 and other characters that strings may contain.
    *lines, _ = path.read_bytes().split(b"\n")
    crc = 0
    for line in lines:
        match = _CHECKED_LINE.fullmatch(line)
        row = None if match is None else match["row"] + b"}"
        stated = 0 if match is None else int(match["crc32"], 16)
        intact = row is not None and zlib.crc32(row, crc) == stated
        yield json.loads(row) if row is not None and intact else None
        crc = stated


def write_rows(path: Path, rows: Iterable[Row]) -> FileDigest:
    """Replaces a file by one line for each object; returns its digest."""
    lines = [_encode(row) + b"\n" for row in rows]
    text = b"".join(lines)
    write_atomically(path, text)
    return FileDigest(len(lines), hashlib.sha256(text).hexdigest())


def parse_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the objects of a JSONL file without a recorded digest.

    Raises:
        DamagedFileError: if there is no file, or a line is not JSON.
    """
    try:
        return _parse_lines(path.read_bytes().split(b"\n")[:-1])
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing") from None
    except ValueError:
        raise DamagedFileError(f"{path} is damaged: a line is not JSON") from None


def move_to_superseded(run: Path, paths: Iterable[Path]) -> Path | None:
    """Moves files and folders of a run into a new folder in its `superseded/`.

    They keep their relative paths: `rollouts/step_000004.jsonl` becomes
    `superseded/0001/rollouts/step_000004.jsonl`.

    Args:
        run: the run folder.
        paths: files and folders to move; missing ones are ignored.

    Returns:
        The new folder; None if there was nothing to move.
    """
    found = [path for path in paths if path.exists()]
    if not found:
        return None
    folder = new_superseded_folder(run)
    for path in found:
        target = folder / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return folder


def new_superseded_folder(run: Path) -> Path:
    """Creates the next numbered folder in a run's `superseded/`."""
    parent = run / "superseded"
    parent.mkdir(exist_ok=True)
    for number in count(1 + sum(1 for _ in parent.iterdir())):
        folder = parent / f"{number:04d}"
        with suppress(FileExistsError):  # the learner's process may create one concurrently
            folder.mkdir()
            return folder
    raise AssertionError


def _checked_line(row: Row, *, after: int) -> bytes:
    """Encodes a row as a line with its checksum.

    Args:
        row: the object.
        after: checksum of the previous line; 0 if there is none.
    """
    text = _encode(row)
    return b'%b, "crc32": "%08x"}\n' % (text[:-1], zlib.crc32(text, after))


def _crc_of(line: bytes) -> int:
    """The checksum in a line; 0 if it has none."""
    match = _CHECKED_LINE.fullmatch(line)
    return 0 if match is None else int(match["crc32"], 16)


def _parse_lines(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def _encode(row: Row) -> bytes:
    """The object as UTF-8 JSON; escaped if it contains lone surrogates, which UTF-8 excludes."""
    try:
        return json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(row).encode()


def _sha256(value: Row) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
