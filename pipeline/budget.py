"""A run's budget: what its configuration gives, what `--extend` has added, what has been used."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from configs.schema import Config, parse_duration_s
from pipeline.run_dir import RunFolder


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
    def of(config: Config, folder: RunFolder) -> Budget:
        """The configured budget and the extensions that are in the run's journal."""
        given = config.budget
        total = Budget(given.steps, given.time_s, given.until_s)
        for entry in folder.events("extended"):
            total += Budget(entry["steps"], entry["time_s"])
        return total

    def deadline_s(self, *, elapsed_s: float, now_s: float) -> float | None:
        """Seconds of the run after which it has to have ended; None: there is no such bound.

        Args:
            elapsed_s: used by now.
            now_s: seconds since 1970 now.
        """
        return self.time_s if self.until_s is None else elapsed_s + self.until_s - now_s

    @property
    def name(self) -> str:
        """The budget in words, as a setting."""
        if self.steps is not None:
            return f"budget.steps = {self.steps}"
        if self.until_s is None:
            return f"budget.time = {show_duration(self.time_s or 0.0)}"
        until = datetime.fromtimestamp(self.until_s).astimezone()
        return f"budget.until = {until.isoformat(timespec='seconds')}"


def used_s(folder: RunFolder) -> float:
    """Seconds that earlier processes used, also those that ended without a new checkpoint.

    What a process did after the last thing that it wrote down is not known. To be asked before the
    folder is rewound.
    """
    known = [folder.noted_s]
    known += [row.get("time/elapsed_s", 0.0) for row in folder.metrics]
    for entry in folder.entries():
        known += [entry.get("elapsed_s", 0.0), entry.get("wall_s", 0.0)]
    return max(known, default=0.0)


def show_duration(seconds: float) -> str:
    """A duration as `budget.time` takes it, to the next whole second."""
    whole = int(-(-seconds // 1))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "m"), (rest, "s")]
    return "".join(f"{amount}{unit}" for amount, unit in parts if amount) or "0s"


def extension(text: str, config: Config, folder: RunFolder) -> Budget:
    """The budget that `--extend TEXT` adds.

    Raises:
        ValueError: if there is no finished run to extend, or the amount is not of the budget's
            kind, or the learning rate has decayed to zero, so that nothing would be learned.
    """
    if folder.summary is None or folder.summary["ended"] != "finished":
        # Else the same command again, which resumes, would extend a second time.
        raise ValueError(
            f"--extend: there is no finished run in {folder.path}; without --extend the same "
            "command starts it or goes on with it"
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
        raise ValueError(f"--extend {text}: this run has budget.steps; give a number of steps")
    return Budget(int(text), None)
