"""`control.jsonl`: requests of `launch.control` to the process that runs a run."""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.contracts.decisions import DecisionLog
from pipeline.contracts.record_files import append_row, read_rows, time_stamp
from pipeline.contracts.steering import STEERED, Request, Verb


def append_request(run: Path, verb: Verb, *, key: str | None = None, value: Any = None) -> Request:
    """Appends a request to those of the run folder `run`; several processes may do so at a time.

    Raises:
        OSError: if the file cannot be written.
    """
    request = Request(secrets.token_hex(4), verb, key, value)
    path = _file(run)
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        append_row(path, {"time": time_stamp(), **request.facts})
    return request


def answer(entries: Iterable[Mapping[str, Any]], request: Request) -> Mapping[str, Any] | None:
    """The journal entry that takes up or refuses the request; None: there is none yet."""
    return next(
        (one for one in entries if one["event"] == STEERED and one["request"] == request.id), None
    )


class Requests:
    """The requests that no process has taken up yet.

    Those after a line that is damaged, or of another version, are ignored: requests must not end a
    run.

    Args:
        run: the run folder.
        entries: its journal.
        log: is told of damage.
    """

    def __init__(
        self, run: Path, entries: Iterable[Mapping[str, Any]], *, log: DecisionLog
    ) -> None:
        self._file, self._log = _file(run), log
        self._taken = {entry["request"] for entry in entries if entry["event"] == STEERED}
        self._size, self._found = 0, tuple[Request, ...]()

    @property
    def pending(self) -> tuple[Request, ...]:
        """These requests, oldest first."""
        self._read()
        return tuple(request for request in self._found if request.id not in self._taken)

    def taken(self, request: Request) -> None:
        """Leaves out a request that the journal has now."""
        self._taken.add(request.id)

    def _read(self) -> None:
        size = self._file.stat().st_size if self._file.is_file() else 0
        if size == self._size:
            return
        found = []
        try:
            for row in read_rows(self._file):
                found.append(Request.of(row))  # noqa: PERF401  # those before a damaged line count
        except ValueError as error:  # DamagedFileError is one
            self._log.event("control_damaged", f"requests are ignored: {error}")
        self._size, self._found = size, tuple(found)


def _file(run: Path) -> Path:
    return run / "control.jsonl"
