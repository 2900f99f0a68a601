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
        """
        self._refuse_file()
        if self._is_busy():
            raise ValueError(f"another process is at work in {self.path}")
        if not self.is_begun:
            if self.path.exists() and {path.name for path in self.path.iterdir()} - {_LOCK}:
                raise ValueError(f"{self.path} is not empty and not a run; choose another run.name")
            return
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
        write_atomically(self._config, config_to_json(config))

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
        """
        found: dict[str, Any] = json.loads(self._config.read_text(encoding="utf-8"))
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
        """What the last clean end wrote."""
        if not self._summary.is_file():
            return None
        found: dict[str, Any] = json.loads(self._summary.read_text(encoding="utf-8"))
        return found

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces `summary.json`."""
        write_atomically(self._summary, json.dumps(summary, indent=2) + "\n")

    @property
    def plan(self) -> dict[str, Any] | None:
        """What `write_plan` wrote last."""
        if not self._plan.is_file():
            return None
        found: dict[str, Any] = json.loads(self._plan.read_text(encoding="utf-8"))
        return found

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Replaces `plan.json`."""
        write_atomically(self._plan, json.dumps(plan, indent=2) + "\n")

    def journal(self, event: str, **facts: Any) -> None:
        """Appends a decision or an event."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        _append(self._journal, [{"time": stamp, "event": event, **facts}])

    def events(self, event: str) -> Iterator[dict[str, Any]]:
        """The journal's entries of one kind, oldest first."""
        return (entry for entry in self.entries() if entry["event"] == event)

    def entries(self) -> Iterator[dict[str, Any]]:
        """All entries of the journal, oldest first."""
        return _read_jsonl(self._journal)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What `write_metrics` has written, oldest first."""
        return list(_read_jsonl(self._metrics))

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Appends a step's metrics."""
        _append(self._metrics, [metrics])

    def write_rollouts(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes `rollouts/NAME.jsonl`."""
        write_atomically(self.rollouts / f"{name}.jsonl", _jsonl(rows))

    def read_rollouts(self, name: str) -> list[dict[str, Any]] | None:
        """Reads `rollouts/NAME.jsonl`; None if it is not there."""
        path = self.rollouts / f"{name}.jsonl"
        return list(_read_jsonl(path)) if path.is_file() else None

    @property
    def validated(self) -> list[int]:
        """Steps whose validation is on record, ascending."""
        found = self.rollouts.glob("validation_*.jsonl")
        return sorted(int(path.stem.removeprefix("validation_")) for path in found)

    def rewind(self, step: int) -> None:
        """Forgets metrics and rollouts of steps after the first `step`, which are done again.

        There is no summary of a run that goes on; that of a finished one is kept in the journal.
        """
        kept = [row for row in self.metrics if row["step"] <= step]
        write_atomically(self._metrics, _jsonl(kept))
        for kind in ("step", "validation"):
            for path in self.rollouts.glob(f"{kind}_*.jsonl"):
                if int(path.stem.removeprefix(f"{kind}_")) > step:
                    path.unlink()
        summary = self.summary
        if summary is not None and summary["ended"] == "finished":
            self.journal("reopened", summary=summary)
        self._summary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file so that a reader sees the old or the new text, never a part."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    text = _jsonl(rows).encode()
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                # A killed process left half a line; ours must not become its end.
                text = b"\n" + text
        file.write(text)


def _jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The file's objects; a line that a killed process left unfinished is passed over."""
    if not path.is_file():
        return
    # Not `splitlines`: a completion may hold U+2028 and other characters that end lines for it.
    for line in path.read_bytes().split(b"\n"):
        try:
            yield json.loads(line)
        except ValueError:
            continue
