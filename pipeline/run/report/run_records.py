"""What a run folder records, read for a report: all that can be read, and what cannot.

Folders of unfinished, failed and killed runs have fewer files. Of a file that does not parse the
lines before the mistake are read; `RunRecords.problems` names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.evaluation import EXACT_ANSWER
from configs.load import read_saved_config
from pipeline.evaluate.summary import mean_of
from pipeline.run.goodput import TimeUse, time_use
from pipeline.run.history import RESUMED, REWARDS_CHANGED, valid_entries
from pipeline.run.record_files import DamagedFileError, read_json, read_rows
from pipeline.run.run_folder import ENDED, RunFolder

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """The records of a run, oldest first.

    Attributes:
        path: the run folder.
        config: content of `config.json`.
        journal: all entries.
        metrics: one row for each step, with its number from 1 under `step`.
        superseded: rows of steps that a resume did again, or has to do again.
        status: content of `status.json`.
        plan: content of `plan.json`.
        running: whether a process holds the folder.
        used_s: seconds that the run has used, as recorded every few seconds.
        problems: files that do not parse, one line each.
    """

    path: Path
    config: Row = field(default_factory=dict)
    journal: Sequence[Row] = ()
    metrics: Sequence[Row] = ()
    superseded: Sequence[Row] = ()
    status: Row = field(default_factory=dict)
    plan: Row = field(default_factory=dict)
    running: bool = False
    used_s: float = 0.0
    problems: Sequence[str] = ()

    @property
    def name(self) -> str:
        """`run.name`, or the folder's."""
        return str(self.setting("run.name") or self.path.name)

    def setting(self, key: str) -> Any:
        """The value of a dotted key of the configuration; None if it is not recorded."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def entries(self, *events: str, since: str | None = None) -> list[Row]:
        """Entries that no later resume rolled back; see `history.valid_entries`."""
        return valid_entries(self.journal, events, since=since)

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Step and value of each row that has the metric."""
        return [(row["step"], row[metric]) for row in self.metrics if metric in row]

    @property
    def tokens(self) -> list[tuple[int, float]]:
        """Step and tokens generated for training of each row that has them."""
        return self.values("tokens/generated")

    @cached_property
    def time_use(self) -> TimeUse:
        """Where the time went; what a running process does since its last step is left out."""
        return time_use(
            self.metrics,
            self.journal,
            superseded=self.superseded,
            used_s=0.0 if self.running else self.used_s,
        )

    @cached_property
    def summary(self) -> Row:
        """The summary of the run's clean end; empty if it has not ended, or was resumed since."""
        found: Row = {}
        for entry in self.journal:
            if entry["event"] in {ENDED, RESUMED}:
                found = entry.get("summary", {})
        return found

    @property
    def steps(self) -> int:
        """Training steps done."""
        return int(max((row["step"] for row in self.metrics), default=0))

    @property
    def failure(self) -> str | None:
        """The error that ended the last process; None if there was none."""
        last = next(
            (one for one in reversed(self.journal) if one["event"] in {"started", "failed", ENDED}),
            {},
        )
        return str(last["error"]) if last.get("event") == "failed" else None

    @property
    def parts(self) -> list[str]:
        """Names of the parts of the reward."""
        functions = self.setting("rewards.functions") or []
        return [part["name"] for part in functions]

    def evaluations(self, name: str) -> list[Row]:
        """Results of an evaluation with a value, oldest first; the last one of each step.

        With a reward as metric only those by the current rewards, as others do not compare.
        """
        is_reward = self.setting("eval.metric") not in {None, EXACT_ANSWER}
        since = REWARDS_CHANGED if is_reward else None
        found = [one for one in self.entries("evaluated", since=since) if one["name"] == name]
        by_step = {one["step"]: one for one in found if mean_of(one) is not None}
        return list(by_step.values())

    def rollouts(self, name: str) -> list[dict[str, Any]]:
        """The rows of `rollouts/NAME.jsonl`.

        Raises:
            DamagedFileError: if it is missing or does not parse.
        """
        return RunFolder(self.path).read_rollouts(name)

    def rollout_steps(self) -> list[int]:
        """Steps with recorded rollouts, ascending."""
        return RunFolder(self.path).rollout_steps()


def read_run(path: Path) -> RunRecords:
    """Reads a run folder.

    Raises:
        ValueError: if the folder is not one of a run.
    """
    folder = RunFolder(path)
    files = ("config.json", "journal.jsonl", "metrics.jsonl", "status.json")
    if not any((path / name).is_file() for name in files):
        raise ValueError(f"{path}: not a run folder: it has none of {', '.join(files)}")
    problems: list[str] = []
    rows = {
        name: _rows(path / f"{name}.jsonl", problems)
        for name in ("journal", "metrics", "metrics.superseded")
    }
    rows["journal"] = [row for row in rows["journal"] if isinstance(row.get("event"), str)]
    return RunRecords(
        path=path,
        config=_config(path / "config.json", problems),
        status=_json(path / "status.json", problems),
        plan=_json(path / "plan.json", problems),
        running=folder.is_locked,
        problems=problems,
        journal=rows["journal"],
        metrics=sorted(
            {row["step"]: row for row in rows["metrics"] if "step" in row}.values(),
            key=lambda row: row["step"],
        ),
        superseded=rows["metrics.superseded"],
        used_s=folder.recorded_used_s,
    )


def _rows(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    rows = []
    try:
        for row in read_rows(path):
            rows.append(row)  # noqa: PERF402  # those before the mistake count
    except DamagedFileError as error:
        problems.append(str(error))
    return rows


def _config(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_saved_config(path)
    except FileNotFoundError:
        return {}
    except ConfigError as error:
        problems.append(str(error))
        return {}


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_json(path) or {}
    except DamagedFileError as error:
        problems.append(str(error))
        return {}
