"""A run's budget: what its configuration gives and what `--extend` has added since."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import Config, parse_duration_s
from pipeline.run_dir import RunFolder


@dataclass(frozen=True)
class Budget:
    """Steps or seconds; the other one is None."""

    steps: int | None
    time_s: float | None

    def __add__(self, other: Budget) -> Budget:
        """The sum of two budgets of the same kind."""
        if self.steps is not None:
            return Budget(self.steps + (other.steps or 0), None)
        return Budget(None, (self.time_s or 0.0) + (other.time_s or 0.0))

    @staticmethod
    def of(config: Config, folder: RunFolder) -> Budget:
        """The configured budget and the extensions that are in the run's journal."""
        total = Budget(config.budget.steps, config.budget.time_s)
        for entry in folder.events("extended"):
            total += Budget(entry["steps"], entry["time_s"])
        return total


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
        try:
            return Budget(None, parse_duration_s(text))
        except ValueError as error:
            raise ValueError(f"--extend: this run has budget.time; {error}") from None
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"--extend {text}: this run has budget.steps; give a number of steps")
    return Budget(int(text), None)
