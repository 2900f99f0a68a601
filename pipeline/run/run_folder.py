"""The run folder: its files, its lock, and the state of its run.

Nothing is written before `create`; reading a folder changes nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from configs.errors import ConfigError
from configs.load import config_to_json, read_saved_config, saved_config_text
from configs.resume import (
    OR_ACCEPT,
    REWARDS,
    altering_changes,
    change_lines,
    is_reward_change,
    refuse_unknown_keys,
)
from configs.schema import Config
from configs.steering import set_value
from configs.toml_text import show_value
from pipeline.contracts.record_files import (
    DamagedFileError,
    FileDigest,
    append_row,
    decode_seconds,
    encode_seconds,
    move_to_superseded,
    read_json,
    read_rows,
    recover_folder,
    replace_rows,
    time_stamp,
    write_atomically,
    write_json,
    write_rows,
)
from pipeline.contracts.steering import sets_in_force, values_at, with_sets
from pipeline.run.history import RESUMED, steps_with_changed_rewards, valid_entries
from pipeline.run.rollout_files import ROLLOUTS, RecordedRollouts

ENDED = "ended"
"""Journal event: a clean end with its summary."""
_LOCK, _STATUS, _REWARDS_LOG = ".lock", "status.json", "rewards.log"
_BEFORE_RUN = frozenset({_LOCK, "start", _STATUS, f"{_STATUS}.tmp", _REWARDS_LOG})
"""What a process that is killed while it loads may leave in a folder without a run."""
_RESTORE = "restore it from a copy, or start another run with --run.name"


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
        self.start = path / "start"
        self.rewards_log = path / _REWARDS_LOG
        self.status = path / _STATUS
        self._config = path / "config.json"
        self.plan_file = path / "plan.json"
        self._journal = path / "journal.jsonl"
        self._metrics = path / "metrics.jsonl"
        self._superseded = path / "metrics.superseded.jsonl"
        self._summary = path / "summary.json"
        self._lock: TextIO | None = None

    @staticmethod
    def of(config: Config) -> RunFolder:
        """The run folder of a configuration."""
        return RunFolder(Path(config.run.dir) / config.run.name)

    def check(self, config: Config, *, accept: Collection[str] = ()) -> None:
        """Refuses to resume a run that another process runs, or that has other settings.

        Args:
            config: of the resume.
            accept: with `rewards` settings of the rewards may have changed.

        Raises:
            ValueError: if another process holds the folder, if its run has other settings (with
                the old and new value of each changed key) or comes from an earlier version, or if
                the path or one of its parents is a file, or `.lock` is not.
            DamagedFileError: if a file that decisions depend on is damaged or missing.
        """
        self._refuse_odd_paths()
        if self.is_locked:
            raise self._in_use()
        if not self.holds_run:
            if self._journal.exists():
                raise DamagedFileError(f"{self._config} is missing; {_RESTORE}")
            if self.path.exists() and {path.name for path in self.path.iterdir()} - _BEFORE_RUN:
                raise ValueError(f"{self.path} is not empty and not a run; choose another run.name")
            return
        self.check_settings(config, accept=accept, place=str(self.path))
        self._check_records()

    def check_settings(self, config: Config, *, accept: Collection[str], place: str) -> None:
        """Refuses to resume a run that has other settings, as `check` does.

        Args:
            config: of the resume.
            accept: see `check`.
            place: where the user knows the run to be.
        """
        saved = self.saved_config
        refuse_unknown_keys(saved, self.path)
        changes = [
            change
            for change in altering_changes(saved, json.loads(config_to_json(config)))
            if not (REWARDS in accept and is_reward_change(change))
        ]
        if changes:
            accepting = "" if any(not is_reward_change(one) for one in changes) else OR_ACCEPT
            raise ValueError(
                f"{place} contains a run with other settings; start another run with "
                f"--run.name, or resume this one with the old values{accepting}:\n"
                + change_lines(changes)
            )

    def _check_records(self) -> None:
        rows, entries, _ = self.metrics, list(self.entries()), self.plan
        if rows and not entries:
            raise DamagedFileError(
                f"{self._journal} is missing or empty, but {self._metrics.name} has {len(rows)} "
                f"steps; {_RESTORE}"
            )
        written = None
        with suppress(DamagedFileError):  # `restore_summary` rewrites it from the journal
            written = read_json(self._summary)
        if written is not None and self.summary is None:
            raise DamagedFileError(
                f"{self._journal} is truncated: according to {self._summary.name} the run has "
                f"ended; {_RESTORE}"
            )

    def check_writable(self) -> None:
        """Checks that the run folder can be written, by creating and removing a temporary folder.

        Raises:
            ValueError: if it cannot be written, or the path or one of its parents is a file.
        """
        self._refuse_odd_paths()
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
            ValueError: if another process is using it, or the path or one of its parents is a file.
        """
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self._take_lock()
        try:
            yield
        finally:
            self.close()
            if not self.holds_run:
                (self.path / _LOCK).unlink()
                self.status.unlink(missing_ok=True)
                shutil.rmtree(self.start, ignore_errors=True)  # a copy
                # A parent may contain another run by now.
                with suppress(OSError):
                    for path in made:
                        path.rmdir()

    def create(self, config: Config) -> None:
        """Creates the folder or opens the existing one, locked for this process.

        Raises:
            ValueError: if another process is using it, or the path or one of its parents is a file.
        """
        if self._lock is None or self._lock.closed:
            self._take_lock()
        recover_folder(self.export)
        self.rollouts.mkdir(exist_ok=True)
        self.write_config(config)

    def write_config(self, config: Config) -> None:
        """Replaces `config.json`."""
        write_atomically(self._config, saved_config_text(config).encode())

    def _refuse_odd_paths(self) -> None:
        above = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not above.is_dir():
            key, value = "run.dir", str(self.path.parent)
            if above == self.path:
                key, value = "run.name", self.path.name
            raise ValueError(f"{key} = {show_value(value)}: {above} is a file; choose another")
        lock = self.path / _LOCK
        if lock.exists() and not lock.is_file():
            raise ValueError(f"{lock} is not a file; remove it, or choose another run.name")

    def _in_use(self) -> ValueError:
        who = ""
        with suppress(
            OSError, ValueError, LookupError, TypeError
        ):  # written a moment after the lock
            status = json.loads(self.status.read_bytes())
            who = f" (by status.json {status['pid']} on {status['host']})"
        return ValueError(
            f"another process{who} is using {self.path}; wait until it ends, or end it with "
            f"launch.control {self.path} stop-after-step"
        )

    def _take_lock(self) -> None:
        self._refuse_odd_paths()
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / _LOCK).open("a")  # "a" keeps the recorded time
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

    def record_used_s(self, seconds: float) -> None:
        """Records the time that the run has used, for a resume after this process is killed.

        Called every few seconds while the folder is locked; thread-safe.

        Raises:
            OSError: if it cannot be written.
        """
        file = os.open(self.path / _LOCK, os.O_WRONLY)
        try:
            os.pwrite(file, encode_seconds(seconds), 0)
        finally:
            os.close(file)

    @property
    def recorded_used_s(self) -> float:
        """The value that `record_used_s` wrote last; 0 if there is none or it is damaged."""
        lock = self.path / _LOCK
        return decode_seconds(lock.read_bytes()) if lock.is_file() else 0.0

    @property
    def holds_run(self) -> bool:
        """Whether the folder contains a run."""
        return self._config.is_file()

    @property
    def saved_config(self) -> dict[str, Any]:
        """The resolved configuration of the run's last start, with what was set since.

        Raises:
            FileNotFoundError: if there is no run.
            DamagedFileError: if it or the journal is damaged.
        """
        try:
            found = read_saved_config(self._config)
        except ConfigError as error:
            raise DamagedFileError(f"{error}; {_RESTORE}") from None
        for key, value in values_at(sets_in_force(self.entries())).items():
            with suppress(KeyError):  # a process that is killed now has not replaced the file
                set_value(found, key, value)
        return found

    def in_force(self, config: Config) -> Config:
        """The configuration of a start with what was set while the run ran; see `with_sets`.

        Raises:
            ConfigError: if the values do not suit other settings, which have changed.
            DamagedFileError: if the journal is damaged.
        """
        return with_sets(config, self.entries()) if self.holds_run else config

    @property
    def is_locked(self) -> bool:
        """Whether a process holds the folder."""
        if not (self.path / _LOCK).is_file():
            return False
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
        """The summary of the last clean end, from the journal; None if the run was resumed since.

        Raises:
            DamagedFileError: if the journal is damaged.
        """
        found = None
        for entry in self.entries():
            if entry["event"] in {ENDED, RESUMED}:
                found = entry.get("summary")
        return found

    def write_summary(self, summary: Mapping[str, Any], **facts: Any) -> None:
        """Journals the summary and replaces `summary.json`, which is a copy for users."""
        self.journal(ENDED, summary=dict(summary), **facts)
        write_json(self._summary, summary)

    def restore_summary(self) -> bool:
        """Rewrites `summary.json` if it is missing or damaged; returns whether it was."""
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
        """The content of `plan.json`; None if there is none.

        Raises:
            DamagedFileError: if `plan.json` is damaged; with the remedy.
        """
        try:
            return read_json(self.plan_file)
        except DamagedFileError as error:
            raise DamagedFileError(
                f"{error}; restore the file from a copy, or delete it to plan the sizes again"
            ) from None

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Replaces `plan.json`."""
        write_json(self.plan_file, plan)

    def journal(self, event: str, **facts: Any) -> None:
        """Appends a decision or an event to the journal."""
        append_row(self._journal, {"time": time_stamp(), "event": event, **facts})

    def entries(self) -> Iterator[dict[str, Any]]:
        """All entries of the journal, oldest first.

        Raises:
            DamagedFileError: if a line is damaged; with the remedy.
        """
        return read_rows(self._journal)

    def sync(self) -> int:
        """Flushes journal and metrics to disk; returns the number of the journal's entries."""
        for path in filter(Path.is_file, (self._journal, self._metrics)):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return sum(1 for _ in self.entries())

    def events(self, event: str) -> Iterator[dict[str, Any]]:
        """The journal's entries of one event, oldest first; raises as `entries`."""
        return (entry for entry in self.entries() if entry["event"] == event)

    def valid_entries(self, *events: str, since: str | None = None) -> list[dict[str, Any]]:
        """Entries that no later resume rolled back; see `history.valid_entries`.

        Raises as `entries`.
        """
        return valid_entries(self.entries(), events, since=since)

    @property
    def reward_changes(self) -> list[int]:
        """Steps after which the rewards changed; see `history.steps_with_changed_rewards`."""
        return steps_with_changed_rewards(self.entries())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of all steps, oldest first, without time stamps and digests.

        Raises:
            DamagedFileError: if a line is damaged; with the remedy.
        """
        return [
            {name: value for name, value in row.items() if name not in {"time", ROLLOUTS}}
            for row in read_rows(self._metrics)
        ]

    @property
    def superseded_metrics(self) -> list[dict[str, Any]]:
        """The rows of steps that a resume has set aside, oldest first."""
        return list(read_rows(self._superseded))

    def write_metrics(self, metrics: Mapping[str, Any], rollouts: FileDigest | None = None) -> None:
        """Appends a step's metrics, with the digest of the file of its rollouts, if it has one."""
        more = {} if rollouts is None else {ROLLOUTS: vars(rollouts)}
        append_row(self._metrics, {"time": time_stamp(), **metrics, **more})

    def write_rollouts(self, name: str, rows: Iterable[Mapping[str, Any]]) -> FileDigest:
        """Writes `rollouts/NAME.jsonl`; returns its digest."""
        return write_rows(self._rollouts_file(name), rows)

    @property
    def recorded_rollouts(self) -> RecordedRollouts:
        """The files in `rollouts/` with their digests."""
        return RecordedRollouts(self.rollouts, self.entries(), read_rows(self._metrics))

    def read_rollouts(self, name: str) -> list[dict[str, Any]]:
        """Reads `rollouts/NAME.jsonl`; raises as `RecordedRollouts.read`."""
        return self.recorded_rollouts.read(name)

    def read_answers(self, evaluated: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers of an evaluation.

        Args:
            evaluated: its entry in the journal.

        Raises:
            DamagedFileError: if the file is missing or differs from what was written.
        """
        digest = FileDigest(evaluated["rows"], evaluated["sha256"])
        return digest.read(self._rollouts_file(evaluated["file"]))

    def _rollouts_file(self, name: str) -> Path:
        return self.rollouts / f"{name}.jsonl"

    def rewind_to(self, step: int) -> Path | None:
        """Moves the summary and the records of steps after `step` to `superseded/`.

        The journal is kept: a resumed run replays its decisions.

        Returns:
            The folder with records of later steps; None if there were none.
        """
        if not self._journal.is_file():
            return None
        rows = list(read_rows(self._metrics))
        later = [row for row in rows if row["step"] > step]
        files = [
            path
            for kind in ("step", "sft", "validation")
            for path in sorted(self.rollouts.glob(f"{kind}_*.jsonl"))
            if int(path.stem.removeprefix(f"{kind}_")) > step
        ]
        superseded = move_to_superseded(self.path, [*files, self._summary])
        for row in later:
            append_row(self._superseded, row)
        if later:
            replace_rows(self._metrics, rows[: len(rows) - len(later)])
        self.journal(RESUMED, step=step)
        return superseded if files else None
