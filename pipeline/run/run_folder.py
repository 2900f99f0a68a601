"""The run folder: what is where, who may write to it, and what state it is in.

Nothing is written before `create`; looking at a folder leaves no trace.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from configs.load import config_to_json
from configs.resume import altering_changes
from configs.schema import Config
from configs.toml_text import show_value
from pipeline.contracts.record_files import (
    Contents,
    DamagedFileError,
    append_row,
    new_superseded,
    parse_rows,
    read_json,
    read_rows,
    replace_rows,
    set_aside,
    write_atomically,
    write_json,
    write_rows,
)

ENDED, RESUMED = "ended", "resumed"
"""Journal events: a clean end, with its summary; a start that goes on after a step."""
_LOCK = ".lock"


class RunFolder:
    """Paths and files of one run.

    Args:
        path: `run.dir`/`run.name`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"
        self._config = path / "config.json"
        self._plan = path / "plan.json"
        self._journal = path / "journal.jsonl"
        self._metrics = path / "metrics.jsonl"
        self._summary = path / "summary.json"
        self._lock: TextIO | None = None

    @staticmethod
    def of(config: Config) -> RunFolder:
        """The folder that a configuration names."""
        return RunFolder(Path(config.run.dir) / config.run.name)

    def check(self, config: Config) -> None:
        """Refuses to go on with a run under another configuration, or that is going on.

        Raises:
            ValueError: naming each changed key with its old and its new value; or if a file is in
                the folder's place or above it.
            DamagedFileError: if a file from which decisions are read is damaged or missing.
        """
        self._refuse_file()
        if self._is_busy():
            raise ValueError(f"another process is at work in {self.path}")
        if not self.is_begun:
            if self.path.exists() and {path.name for path in self.path.iterdir()} - {_LOCK}:
                raise ValueError(f"{self.path} is not empty and not a run; choose another run.name")
            return
        self._check_records()
        changes = altering_changes(self.settings, json.loads(config_to_json(config)))
        if changes:
            lines = [
                f"  {key}: was {show_value(before)}, is {show_value(after)}"
                for key, before, after in changes
            ]
            raise ValueError(
                f"{self.path} holds a run with other settings; --run.name starts another run, "
                "the old values resume this one:\n" + "\n".join(lines)
            )

    def _check_records(self) -> None:
        rows, entries, _ = self.metrics, list(self.entries()), self.plan
        if rows and not entries:
            raise DamagedFileError(
                f"{self._journal} is missing or empty, and {self._metrics.name} has {len(rows)} "
                "steps; restore it from a copy, or start another run with --run.name"
            )
        written = None
        with suppress(DamagedFileError):  # it is written again from the journal
            written = read_json(self._summary)
        if written is not None and self.summary is None:
            raise DamagedFileError(
                f"{self._journal} has lost its end: {self._summary.name} says that the run has "
                "ended; restore it from a copy, or start another run with --run.name"
            )

    def check_writable(self) -> None:
        """Makes a folder where the run folder is or will be, and removes it.

        Raises:
            ValueError: if that is refused, or a file is in the folder's place or above it.
        """
        self._refuse_file()
        above = next(path for path in (self.path, *self.path.parents) if path.exists())
        try:
            # Not `os.access`, which allows root everything that has permission bits.
            Path(tempfile.mkdtemp(prefix=".", dir=above)).rmdir()
        except OSError as error:
            value, why = show_value(str(self.path.parent)), error.strerror
            raise ValueError(
                f"run.dir = {value}: {above} cannot be written: {why}; choose another"
            ) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other processes out; a folder in which nothing was begun is gone again afterwards.

        Raises:
            ValueError: if another process is at work in it, or a file in its place or above it.
        """
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self._take_lock()
        try:
            yield
        finally:
            self.close()
            if not self.is_begun:
                (self.path / _LOCK).unlink()
                # Another run may have begun in one of them.
                with suppress(OSError):
                    for path in made:
                        path.rmdir()

    def create(self, config: Config) -> None:
        """Makes the folder or opens the one that is there, locked for this process.

        Raises:
            ValueError: if another process is at work in it, or a file in its place or above it.
        """
        if self._lock is None or self._lock.closed:
            self._take_lock()
        self.rollouts.mkdir(exist_ok=True)
        write_atomically(self._config, config_to_json(config).encode())

    def _refuse_file(self) -> None:
        above = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not above.is_dir():
            key, value = "run.dir", str(self.path.parent)
            if above == self.path:
                key, value = "run.name", self.path.name
            raise ValueError(f"{key} = {show_value(value)}: {above} is a file; choose another")

    def _take_lock(self) -> None:
        self._refuse_file()
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / _LOCK).open("a")  # what it says of the time that was used stays
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(f"another process is at work in {self.path}") from None
        self._lock = lock

    def close(self) -> None:
        """Lets other processes at the folder."""
        if self._lock is not None:
            self._lock.close()

    def note_used(self, seconds: float) -> None:
        """Writes down how much time the run has used, for who comes after a process that is killed.

        Meant to be called every few seconds while the folder is held, from any thread.

        Raises:
            OSError: if it cannot be written.
        """
        file = os.open(self.path / _LOCK, os.O_WRONLY)
        try:
            # Always as long, so that nothing has to be cut off before it is written.
            os.pwrite(file, f"{seconds:016.3f}\n".encode(), 0)
        finally:
            os.close(file)

    @property
    def noted_s(self) -> float:
        """What `note_used` has written last; 0 if that is nothing, or damaged."""
        try:
            return float((self.path / _LOCK).read_bytes() or 0.0)
        except (FileNotFoundError, ValueError):
            return 0.0

    @property
    def is_begun(self) -> bool:
        """Whether there is a run in it."""
        return self._config.is_file()

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration that the run has gone on with last.

        Raises:
            FileNotFoundError: if there is no run.
            DamagedFileError: if it is not JSON.
        """
        try:
            found: dict[str, Any] = json.loads(self._config.read_bytes())
        except ValueError as error:
            raise DamagedFileError(
                f"{self._config} is damaged: {error}; restore it from a copy, or start another run "
                "with --run.name"
            ) from None
        return found

    def _is_busy(self) -> bool:
        try:
            lock = (self.path / _LOCK).open()
        except FileNotFoundError:
            return False
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @property
    def summary(self) -> dict[str, Any] | None:
        """What the last clean end wrote, from the journal; None if the run has gone on since.

        Raises:
            DamagedFileError: if the journal is damaged.
        """
        found = None
        for entry in self.entries():
            if entry["event"] in {ENDED, RESUMED}:
                found = entry.get("summary")
        return found

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Journals the summary and replaces `summary.json`, which is a copy for readers."""
        self.journal(ENDED, summary=dict(summary))
        write_json(self._summary, summary)

    def restore_summary(self) -> bool:
        """Writes `summary.json` again if it is missing or damaged; returns whether it was."""
        summary = self.summary
        if summary is None:
            return False
        try:
            if read_json(self._summary) == summary:
                return False
        except DamagedFileError:
            pass
        write_json(self._summary, summary)
        return True

    @property
    def plan(self) -> dict[str, Any] | None:
        """What `write_plan` wrote last.

        Raises:
            DamagedFileError: if `plan.json` is damaged; with the remedy.
        """
        try:
            return read_json(self._plan)
        except DamagedFileError as error:
            raise DamagedFileError(
                f"{error}; restore the file from a copy, or delete it to plan the sizes again"
            ) from None

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Replaces `plan.json`."""
        write_json(self._plan, plan)

    def journal(self, event: str, **facts: Any) -> None:
        """Appends a decision or an event."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        append_row(self._journal, {"time": stamp, "event": event, **facts})

    def entries(self) -> Iterator[dict[str, Any]]:
        """All entries of the journal, oldest first.

        Raises:
            DamagedFileError: if a line is damaged; with the remedy.
        """
        return read_rows(self._journal)

    def sync(self) -> int:
        """Makes journal and metrics survive a loss of power; returns the journal's lines."""
        for path in (self._journal, self._metrics):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        return sum(1 for _ in self.entries())

    def events(self, event: str) -> Iterator[dict[str, Any]]:
        """The journal's entries of one kind, oldest first; raises as `entries`."""
        return (entry for entry in self.entries() if entry["event"] == event)

    def standing(self, *events: str) -> list[dict[str, Any]]:
        """Entries of these kinds, oldest first, whose `step` no later resume has gone back behind.

        Raises as `entries`.
        """
        found: list[dict[str, Any]] = []
        for entry in self.entries():
            if entry["event"] == RESUMED:
                found = [earlier for earlier in found if earlier["step"] <= entry["step"]]
            elif entry["event"] in events:
                found.append(entry)
        return found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What `write_metrics` has written, oldest first.

        Raises:
            DamagedFileError: if a line is damaged; with the remedy.
        """
        return list(read_rows(self._metrics))

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Appends a step's metrics."""
        append_row(self._metrics, metrics)

    def write_rollouts(self, name: str, rows: Iterable[Mapping[str, Any]]) -> Contents:
        """Writes `rollouts/NAME.jsonl`; returns what a reader has to find in it."""
        return write_rows(self._rollouts_file(name), rows)

    def read_rollouts(self, name: str) -> list[dict[str, Any]]:
        """Reads `rollouts/NAME.jsonl`, for what neither decides nor reports anything.

        Raises:
            DamagedFileError: if it is missing, or no JSONL.
        """
        return parse_rows(self._rollouts_file(name))

    def read_answers(self, evaluated: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers of an evaluation.

        Args:
            evaluated: its entry in the journal.

        Raises:
            DamagedFileError: if the file is missing, or holds anything but what was written.
        """
        contents = Contents(evaluated["rows"], evaluated["sha256"])
        return contents.read(self._rollouts_file(evaluated["file"]))

    def _rollouts_file(self, name: str) -> Path:
        return self.rollouts / f"{name}.jsonl"

    def resume_at(self, step: int) -> Path | None:
        """Goes on after the first `step` steps: records of later ones move to `superseded/`.

        So does the summary. The journal stays whole: what it has decided is decided alike.

        Returns:
            The folder that they are in; None: there was nothing to move.
        """
        if not self._journal.is_file():
            return None
        rows = self.metrics
        later = [row for row in rows if row["step"] > step]
        files = [
            path
            for kind in ("step", "sft", "validation")
            for path in sorted(self.rollouts.glob(f"{kind}_*.jsonl"))
            if int(path.stem.removeprefix(f"{kind}_")) > step
        ]
        aside = set_aside(self.path, [*files, self._summary])
        if later:
            aside = aside or new_superseded(self.path)
            replace_rows(aside / self._metrics.name, later)
            replace_rows(self._metrics, rows[: len(rows) - len(later)])
        self.journal(RESUMED, step=step)
        return aside
