"""The run folder: its files, its lock, and the state of its run.

Nothing is written before `create`; reading a folder changes nothing.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from configs.errors import ConfigError
from configs.load import config_to_json, read_saved_config
from configs.resume import (
    altering_changes,
    is_accepted,
    refusal,
)
from configs.schema import Config
from configs.toml_text import show_value
from pipeline.run.history import ENDED, RESUMED, valid_entries
from pipeline.run.record_files import (
    RESTORE,
    DamagedFileError,
    append_row,
    read_json,
    read_rows,
    recover_folder,
    supersede_rows,
    time_stamp,
    write_atomically,
    write_json,
    write_rows,
)

_LOCK, _STATUS, _REWARDS_LOG = ".lock", "status.json", "rewards.log"
_BEFORE_RUN = frozenset({_LOCK, "start", _STATUS, f"{_STATUS}.tmp", _REWARDS_LOG})
"""What a process that is killed while it loads may leave in a folder without a run."""


class RunFolder:
    """Paths and files of one run, in `run.dir`/`run.name`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"
        self.start = path / "start"
        self.rewards_log = path / _REWARDS_LOG
        self.status = path / _STATUS
        self._config = path / "config.json"
        self._plan = path / "plan.json"
        self._journal = path / "journal.jsonl"
        self._metrics = path / "metrics.jsonl"
        self._summary = path / "summary.json"
        self._lock: TextIO | None = None

    @staticmethod
    def of(config: Config) -> RunFolder:
        """The run folder of a configuration."""
        return RunFolder(Path(config.run.dir) / config.run.name)

    def check(self, config: Config, *, accept: Collection[str] = ()) -> None:
        """Refuses to resume a run that another process runs, or that has other settings.

        `accept` are settings that may have changed; see `configs.resume.is_accepted`.

        Raises:
            ValueError: if another process holds the folder, if its run has other settings (with
                the old and new value of each changed key), or if the path is no folder, or one of
                other things.
            DamagedFileError: if a file that a resume reads does not parse or is missing.
        """
        if self.is_locked:
            raise self._in_use()
        if not self.holds_run:
            if self._journal.exists():
                raise DamagedFileError(f"{self._config} is missing; {RESTORE}")
            is_folder = self.path.is_dir()
            found = {path.name for path in self.path.iterdir()} if is_folder else set[str]()
            if found - _BEFORE_RUN or (self.path.exists() and not is_folder):
                raise ValueError(f"{self.path} is not empty and not a run; choose another run.name")
            return
        saved = self.saved_config
        changes = [
            change
            for change in altering_changes(saved, json.loads(config_to_json(config)))
            if not is_accepted(change, accept)
        ]
        if changes:
            raise ValueError(f"{self.path} contains a run with other settings; {refusal(changes)}")
        self._check_records()

    def _check_records(self) -> None:
        """Reads what a resume needs, so that it is refused before anything is loaded."""
        rows, _ = self.metrics, self.plan
        if rows and not any(True for _ in self.entries()):
            raise DamagedFileError(
                f"{self._journal} is missing or empty, but {self._metrics.name} has {len(rows)} "
                f"steps; {RESTORE}"
            )
        for entry in self.valid_entries("evaluated"):
            self.read_rollouts(entry["file"])

    def check_writable(self) -> None:
        """Checks that the run folder can be written, by creating and removing a temporary folder.

        Raises:
            ValueError: if it cannot be written, also because a parent of it is a file.
        """
        above = next(path for path in (self.path, *self.path.parents) if path.exists())
        try:
            # Not `os.access`, which for root does not detect read-only file systems.
            Path(tempfile.mkdtemp(prefix=".", dir=above)).rmdir()
        except OSError as error:
            value, why = show_value(str(self.path.parent)), error.strerror
            raise ValueError(
                f"run.dir = {value}: {above} cannot be written: {why}; choose another"
            ) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks the folder for this process, and removes it afterwards if it has no run.

        Raises:
            ValueError: if another process is using it.
        """
        self._take_lock()
        try:
            yield
        finally:
            self.close()
            if not self.holds_run:
                (self.path / _LOCK).unlink()
                self.status.unlink(missing_ok=True)
                shutil.rmtree(self.start, ignore_errors=True)  # a copy
                with suppress(OSError):
                    self.path.rmdir()

    def create(self, config: Config) -> None:
        """Creates the folder or opens the existing one, locked for this process; as `held`."""
        if self._lock is None or self._lock.closed:
            self._take_lock()
        recover_folder(self.export)
        self.rollouts.mkdir(exist_ok=True)
        write_atomically(self._config, config_to_json(config).encode())

    def _in_use(self) -> ValueError:
        status = self.last_status  # written a moment after the lock
        who = f" (by status.json {status['pid']} on {status['host']})" if "pid" in status else ""
        return ValueError(
            f"another process{who} is using {self.path}; wait until it ends, or end it "
            "with Ctrl-C, SIGTERM or ray job stop"
        )

    def _take_lock(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / _LOCK).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise self._in_use() from None
        self._lock = lock

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()

    @property
    def last_status(self) -> dict[str, Any]:
        """The content of `status.json`, written every few seconds; empty if there is none."""
        with suppress(DamagedFileError, OSError):
            return read_json(self.status) or {}
        return {}

    @property
    def recorded_used_s(self) -> float:
        """The time that the run has used by `status.json`; 0 if it is unknown."""
        return float(self.last_status.get("elapsed_s", 0.0))

    def record_used_s(self, seconds: float) -> None:
        """Changes `recorded_used_s`, between two processes of the run."""
        write_json(self.status, {**self.last_status, "elapsed_s": seconds})

    @property
    def holds_run(self) -> bool:
        """Whether the folder contains a run."""
        return self._config.is_file()

    @property
    def saved_config(self) -> dict[str, Any]:
        """The resolved configuration of the run's last start.

        Raises `DamagedFileError`, as do the records below, if it does not parse.
        """
        try:
            return read_saved_config(self._config)
        except ConfigError as error:
            raise DamagedFileError(f"{error}; {RESTORE}") from None

    @property
    def is_locked(self) -> bool:
        """Whether a process holds the folder."""
        try:
            with (self.path / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # there is no such file
            return False
        return False

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary of the last clean end; None: there was none, or the run was resumed since."""
        return read_json(self._summary)

    def write_summary(self, summary: Mapping[str, Any], **facts: Any) -> None:
        """Writes `summary.json`, and journals the end with these facts."""
        write_json(self._summary, summary)
        self.journal(ENDED, ended=summary["ended"], **facts)

    @property
    def plan(self) -> dict[str, Any] | None:
        """The content of `plan.json`; None if there is none."""
        try:
            return read_json(self._plan)
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}; or delete it to plan the sizes again") from None

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Replaces `plan.json`."""
        write_json(self._plan, plan)

    def journal(self, event: str, **facts: Any) -> None:
        """Appends an event to the journal."""
        append_row(self._journal, {"time": time_stamp(), "event": event, **facts})

    def entries(self) -> Iterator[dict[str, Any]]:
        """All entries of the journal, oldest first."""
        return read_rows(self._journal)

    def events(self, event: str) -> Iterator[dict[str, Any]]:
        """The journal's entries of one event, oldest first."""
        return (entry for entry in self.entries() if entry["event"] == event)

    def valid_entries(self, *events: str) -> list[dict[str, Any]]:
        """Entries that no later resume rolled back; see `history.valid_entries`."""
        return valid_entries(self.entries(), events)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of all steps, oldest first, without time stamps."""
        return [
            {name: value for name, value in row.items() if name != "time"}
            for row in read_rows(self._metrics)
        ]

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Appends a step's metrics."""
        append_row(self._metrics, {"time": time_stamp(), **metrics})

    def rollouts_file(self, name: str) -> Path:
        """`rollouts/NAME.jsonl`."""
        return self.rollouts / f"{name}.jsonl"

    def rollout_steps(self) -> list[int]:
        """Steps whose rollouts are in `rollouts/step_NNNNNN.jsonl`, ascending."""
        return self._steps_with_file("step")

    def write_rollouts(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes `rollouts/NAME.jsonl`."""
        write_rows(self.rollouts_file(name), rows)

    def read_rollouts(self, name: str) -> list[dict[str, Any]]:
        """Reads `rollouts/NAME.jsonl`.

        Raises:
            DamagedFileError: if it is missing or does not parse; with the remedy.
        """
        path = self.rollouts_file(name)
        if not path.is_file():
            raise DamagedFileError(f"{path} is missing; {RESTORE}")
        return list(read_rows(path))

    def rewind_to(self, step: int) -> None:
        """Moves the records of steps after `step` aside: they are written again.

        They go to `NAME.superseded.jsonl`, beside the file that they were in, and so does the
        summary; a kill meanwhile may leave them there twice. The journal is kept.
        """
        if not self._journal.is_file():
            return
        if (summary := self.summary) is not None:
            supersede_rows(self._summary, [summary])
            self._summary.unlink()
        self.journal(RESUMED, step=step)
        rows = list(read_rows(self._metrics))
        later = [row for row in rows if row["step"] > step]
        if later:
            supersede_rows(self._metrics, later)
            write_rows(self._metrics, [row for row in rows if row["step"] <= step])
        for kind in ("step", "sft", "validation"):
            for number in self._steps_with_file(kind):
                if number > step:
                    path = self.rollouts_file(f"{kind}_{number:06d}")
                    supersede_rows(path, read_rows(path))
                    path.unlink()

    def _steps_with_file(self, kind: str) -> list[int]:
        stems = (path.stem for path in self.rollouts.glob(f"{kind}_*.jsonl"))
        numbers = (stem.removeprefix(f"{kind}_") for stem in stems)
        return sorted(int(number) for number in numbers if number.isdecimal())
