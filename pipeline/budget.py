"""The budget of a run: the configured budget, its extensions by `--extend`, and the time used."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from configs.base import parse_duration_s
from configs.budget import Budget as Setting
from configs.schema import Config
from pipeline.deadline import show_duration
from pipeline.run.run_folder import RunFolder


@dataclass(frozen=True)
class Budget:
    """Steps, seconds, or an instant in seconds since 1970; the others are None."""

    steps: int | None
    time_s: float | None
    until_s: float | None = None

    def __add__(self, other: Budget) -> Budget:
        """The sum of two budgets of the same kind; time is added to an instant, too."""
        if self.steps is not None:
            return Budget(self.steps + (other.steps or 0), None)
        if self.until_s is not None:
            return Budget(None, None, self.until_s + (other.time_s or 0.0))
        return Budget(None, (self.time_s or 0.0) + (other.time_s or 0.0))

    @staticmethod
    def of(config: Config, history: RunFolder) -> Budget:
        """The configured budget and its extensions, which are in the run's journal.

        A configured budget that differs from that of the run replaces it and its extensions.
        """
        total = given = Budget.given(config.budget)
        if replaces_budget(config, history):
            return given
        for entry in history.entries():
            # A `budget` entry with other values was replaced, or never came into force.
            if entry["event"] == "budget":
                if Budget(entry["steps"], entry["time_s"], entry["until_s"]) == given:
                    total = given
            elif entry["event"] == "extended":
                total += Budget(entry["steps"], entry["time_s"])
        return total

    @staticmethod
    def given(setting: Setting) -> Budget:
        """The budget of a configuration."""
        return Budget(setting.steps, setting.time_s, setting.until_s)

    def deadline_s(self, *, elapsed_s: float, now_s: float) -> float | None:
        """Seconds of the run at which it must end; None: a budget of steps.

        Args:
            elapsed_s: seconds used so far.
            now_s: seconds since 1970 now.
        """
        return self.time_s if self.until_s is None else elapsed_s + self.until_s - now_s

    @property
    def name(self) -> str:
        """The budget as text, in the form of a setting."""
        if self.steps is not None:
            return f"budget.steps = {self.steps}"
        if self.until_s is None:
            return f"budget.time = {show_duration(self.time_s or 0.0)}"
        until = datetime.fromtimestamp(self.until_s).astimezone()
        return f"budget.until = {until.isoformat(timespec='seconds')}"


def replaces_budget(config: Config, history: RunFolder) -> bool:
    """Whether a run exists whose saved configuration has another budget."""
    if not history.holds_run:
        return False
    before = Setting.model_validate(history.saved_config["budget"])
    return Budget.given(before) != Budget.given(config.budget)


def used_s(history: RunFolder) -> float:
    """Seconds that earlier processes used, also those that ended without a new checkpoint.

    The time of a process after its last record is unknown. Call this before rewinding the folder.
    """
    known = [history.recorded_used_s]
    known += [row.get("time/elapsed_s", 0.0) for row in history.metrics]
    known += [entry.get("elapsed_s", 0.0) for entry in history.entries()]
    return max(known)


def extension(text: str, config: Config, history: RunFolder) -> Budget:
    """The budget that `--extend TEXT` adds.

    Raises:
        ValueError: if there is no finished run to extend, the amount is not of the budget's kind,
            or the learning rate has decayed to zero.
    """
    if history.summary is None or history.summary["ended"] != "finished":
        # Otherwise repeating the command, which resumes the run, would extend it twice.
        raise ValueError(
            f"--extend: there is no finished run in {history.path}; without --extend the same "
            "command starts or continues it"
        )
    if config.learner.schedule != "constant":
        raise ValueError(
            f"--extend: learner.schedule = {config.learner.schedule!r} ends with a learning rate "
            "of zero; only runs with schedule = 'constant' can be extended"
        )
    if config.budget.steps is None:
        key = "budget.time" if config.budget.until is None else "budget.until"
        try:
            return Budget(None, parse_duration_s(text))
        except ValueError as error:
            raise ValueError(f"--extend: this run has {key}; {error}") from None
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(
            f"--extend {text}: this run has budget.steps; give a number of steps, at least 1"
        )
    return Budget(int(text), None)
