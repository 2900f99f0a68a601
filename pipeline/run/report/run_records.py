"""What a run folder records, read for a report.

Folders of unfinished, failed and killed runs have fewer files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.evaluation import EXACT_ANSWER
from pipeline.evaluate.evaluation import Evaluation, compare
from pipeline.evaluate.recorded import best_of, evaluations
from pipeline.evaluate.summary import ACCURACY, mean_of
from pipeline.run.goodput import TimeUse, time_use
from pipeline.run.history import ENDED, STARTED, valid_entries
from pipeline.run.record_files import read_json, read_rows
from pipeline.run.run_folder import RunFolder

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """The records of a run, oldest first.

    Attributes:
        metrics: one row for each step, with its number from 1 under `step`.
        summary: empty: the run has not ended, or was resumed since.
        running: whether a process holds the folder.
    """

    path: Path
    config: Row = field(default_factory=dict)
    journal: Sequence[Row] = ()
    metrics: Sequence[Row] = ()
    status: Row = field(default_factory=dict)
    plan: Row = field(default_factory=dict)
    summary: Row = field(default_factory=dict)
    running: bool = False

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

    def entries(self, *events: str) -> list[Row]:
        """Entries that no later resume rolled back; see `history.valid_entries`."""
        return valid_entries(self.journal, events)

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Step and value of each row that has the metric."""
        return [(row["step"], row[metric]) for row in self.metrics if metric in row]

    @property
    def last_row(self) -> Row:
        """Metrics of the last step; empty if there was none."""
        return self.metrics[-1] if self.metrics else {}

    @cached_property
    def time_use(self) -> TimeUse:
        """Where the time went; what a running process does since its last step is left out."""
        used_s = 0.0 if self.running else self.status.get("elapsed_s", 0.0)
        return time_use(self.metrics, self.journal, used_s=used_s)

    @property
    def steps(self) -> int:
        """Training steps done."""
        return int(max((row["step"] for row in self.metrics), default=0))

    @property
    def steps_planned(self) -> int | None:
        """The steps that the run will have, as planned after the last one; None: not known."""
        planned = self.last_row.get("budget/steps_planned", self.setting("budget.steps"))
        return None if planned is None else int(planned)

    @property
    def failure(self) -> str | None:
        """The error that ended the last process; None if there was none."""
        marks = [one for one in self.journal if one["event"] in {STARTED, "failed", ENDED}]
        return marks[-1]["error"] if marks and marks[-1]["event"] == "failed" else None

    @property
    def parts(self) -> list[str]:
        """Names of the parts of the reward."""
        functions = self.setting("rewards.functions") or []
        return [part["name"] for part in functions]

    def evaluations(self, name: str) -> list[Row]:
        """Results of an evaluation with a value, oldest first; the last one of each step."""
        uses_rewards = self.setting("eval.metric") not in {None, EXACT_ANSWER}
        entries = evaluations(self.journal, uses_rewards=uses_rewards)
        found = [one for one in entries if one["name"] == name and mean_of(one) is not None]
        by_step = {one["step"]: one for one in found}
        return list(by_step.values())

    @property
    def best_validation(self) -> Row | None:
        """The best validation, as the run chose it; None: there was none."""
        return best_of(self.evaluations("validation"))

    def rollouts(self, name: str) -> list[dict[str, Any]]:
        """The rows of `rollouts/NAME.jsonl`; none if it is missing.

        Raises:
            DamagedFileError: if it does not parse.
        """
        return list(read_rows(RunFolder(self.path).rollouts_file(name)))

    def rollout_steps(self) -> list[int]:
        """Steps with recorded rollouts, ascending."""
        return RunFolder(self.path).rollout_steps()


def paired_change(
    first: RunRecords, before: Row, second: RunRecords, after: Row
) -> dict[str, Any] | None:
    """Both summaries and the change, as `evaluation.compare` returns them.

    Prompts are the same if id and reference answer are; of each the samples that both have count.
    None if they have no prompt in common. `before` and `after` are journal entries of evaluations
    by the same metric, of two runs or the same one.
    """
    ours, theirs = _by_prompt(first, before), _by_prompt(second, after)
    common = [prompt for prompt in ours if prompt in theirs]
    if not common:
        return None
    samples = min(len(found[prompt]) for found in (ours, theirs) for prompt in common)
    metric = before["metric"]
    of_accuracy = metric != EXACT_ANSWER and ACCURACY in before
    one, other = (
        Evaluation.of(
            [row for prompt in common for row in found[prompt][:samples]],
            metric=metric,
            of_accuracy=of_accuracy,
        )
        for found in (ours, theirs)
    )
    return compare(one, other)


def _by_prompt(run: RunRecords, evaluated: Row) -> dict[tuple[int, str | None], list[Row]]:
    found: dict[tuple[int, str | None], list[Row]] = {}
    for row in run.rollouts(evaluated["file"]):
        found.setdefault((row["prompt_id"], row["answer"]), []).append(row)
    return found


def read_run(path: Path) -> RunRecords:
    """Reads a run folder.

    Raises:
        ValueError: if the folder is not one of a run.
        DamagedFileError: if a file does not parse.
    """
    folder = RunFolder(path)
    files = ("config.json", "journal.jsonl", "metrics.jsonl", "status.json")
    if not any((path / name).is_file() for name in files):
        raise ValueError(f"{path}: not a run folder: it has none of {', '.join(files)}")
    return RunRecords(
        path=path,
        config=folder.saved_config if folder.holds_run else {},
        status=read_json(folder.status) or {},
        plan=folder.plan or {},
        summary=folder.summary or {},
        running=folder.is_locked,
        journal=list(folder.entries()),
        metrics=folder.metrics,
    )
