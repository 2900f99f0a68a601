"""The deadline of a run: measured seconds of its parts, and which work still fits.

    measured parts -> seconds of the next step, of the end of the run, of a restart
                   -> allows another step? with how many prompts, at which learning rate?
                      how much of the test?

The training loop asks with plain `if`s (`pipeline/coordinator.py`). All clock readings are
arguments: `now_s` is the time that the run has used, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_high
from typing import Any

from configs.schema import Config

EXPORT, CHECKPOINT, SYNC, EXIT = "export", "checkpoint", "sync", "exit"
VALIDATION = "validation evaluation"
UPDATE = "update"
BETWEEN_STEPS = "between steps"
"""Parts of a run whose seconds are estimated, then measured; see also `step_part` and
`evaluation_part`."""
SAFETY = 1.2
"""A part of the end may take this many times its expected seconds."""
_FIXED = 0.2
"""Share of a full step's time that does not fall with its prompts."""
_CLOSE = 0.9999
_LAST = 3
_EVALUATION = " evaluation"
_START_S = 20.0
_BYTES_PER_S = 2e9


class BudgetTooSmallError(ValueError):
    """Not one step fits into the budget.

    Attributes:
        minimum_s: the smallest budget that is known to suffice.
    """

    def __init__(self, message: str, *, minimum_s: float) -> None:
        super().__init__(message)
        self.minimum_s = minimum_s


def evaluation_part(name: str) -> str:
    """The part of a run that evaluates a split."""
    return f"{name}{_EVALUATION}"


def step_part(phase: str) -> str:
    """The part of a run that is a training step of this phase."""
    return f"{phase} step"


@dataclass
class PartTimes:
    """Seconds of each part of a run: steps, validation, export, checkpoint, tests, exit.

    Attributes:
        estimates: seconds of parts that were not measured yet.
        measured: all measurements of each part, oldest first.
    """

    estimates: dict[str, float] = field(default_factory=dict)
    measured: dict[str, list[float]] = field(default_factory=dict)

    def observe(self, part: str, seconds: float) -> None:
        """Adds a measurement."""
        self.measured.setdefault(part, []).append(seconds)

    def expected_s(self, part: str) -> float:
        """Median of the last three measurements, which a single stall does not change."""
        if part in self.measured:
            return median_high(self.measured[part][-_LAST:])
        return self.estimates.get(part, 0.0)


@dataclass
class Deadline:
    """Whether another step may start, and when work is abandoned.

    A run of steps counts steps. A run with a time budget starts a step if the step and what has to
    follow fit into the remaining time: checkpoint, validation, export, final evaluations, and one
    restart of the run's process. Work that takes longer than expected uses the time of the restart
    first and then shortens the final evaluation (see `test_share`), which comes after the export.

    Attributes:
        config: of the run.
        steps: number of steps; None: the budget is time.
        time_s: seconds of the budget; None: the budget is steps.
        until_s: the deadline in seconds since 1970, if it was given as an instant.
        parts: seconds of each part of the run.
        once_s: seconds of this process's start that a restart does not repeat; see `Chosen`.
        restart_s: seconds from a restart until it trains, without evaluations.
    """

    config: Config
    steps: int | None
    time_s: float | None
    until_s: float | None = None
    parts: PartTimes = field(default_factory=PartTimes)
    once_s: float = 0.0
    restart_s: float = 0.0
    _trains_from_s: float | None = None

    @property
    def is_timed(self) -> bool:
        """Whether the budget is time."""
        return self.time_s is not None

    def left_s(self, now_s: float) -> float:
        """Seconds until the deadline; infinite in a run of steps."""
        return math.inf if self.time_s is None else self.time_s - now_s

    # --- measurements

    def recall(self, rows: Sequence[Mapping[str, Any]], entries: Iterable[Any]) -> None:
        """Adds what earlier processes of the run have recorded in metrics and journal."""
        for row in rows:
            self.observe(row)
        for entry in entries:
            if entry["event"] in {"reserved", CHECKPOINT}:
                self.parts.observe(entry.get("reason", CHECKPOINT), entry["seconds"])

    def observe(self, row: Mapping[str, Any]) -> None:
        """Adds the seconds of a training step and of its update, as if it had all its prompts."""
        phase = self.config.phase_of(row["step"] - 1)
        full = self.config.rollout.prompts_per_step
        cost = self._cost(row.get("rollout/prompts_planned", full))
        if phase == "grpo":
            self.parts.observe(UPDATE, row["time/learn_s"] / cost)
            self._train(row["time/elapsed_s"] - row["time/step_s"])
        self.parts.observe(step_part(phase), row["time/step_s"] / cost)

    def _cost(self, prompts: float) -> float:
        """Seconds of a step, or of its update, relative to those with all its prompts."""
        return _FIXED + (1 - _FIXED) * prompts / self.config.rollout.prompts_per_step

    def estimate_step(self, *, answers: int) -> None:
        """Estimates a step from the evaluation before training, until one was measured.

        Half of it is sampling, at the rate of that evaluation, the other half the update.
        """
        each_s = self.parts.expected_s(evaluation_part("test")) / max(answers, 1)
        sampling_s = each_s * self.config.rollout.size
        self.parts.estimates |= {UPDATE: sampling_s} | dict.fromkeys(
            (step_part("sft"), step_part("grpo")), 2 * sampling_s
        )

    # --- another step

    def allows_step(self, number: int, now_s: float) -> bool:
        """Whether step `number`, counted from 0, can finish in time."""
        if self.steps is not None:
            return number < self.steps
        return self.prompts_that_fit(number, now_s) > 0

    def prompts_that_fit(self, number: int, now_s: float) -> int:
        """Prompts of the largest step `number` that can finish in time; 0: none can."""
        sizes = range(self.config.rollout.prompts_per_step, self._fewest(number) - 1, -1)
        fitting = (size for size in sizes if self.missing_s(number, now_s, prompts=size) <= 0)
        return next(fitting, 0)

    def missing_s(self, number: int, now_s: float, *, prompts: int) -> float:
        """Seconds by which a step with so many prompts, and the end, exceed the time left."""
        return self._step_s(number) * self._cost(prompts) + self.reserve_s - self.left_s(now_s)

    def _fewest(self, number: int) -> int:
        """Minimum number of prompts of a step; those of the SFT phase have one size."""
        rollout, phase = self.config.rollout, self.config.phase_of(number)
        return rollout.prompts_per_step if phase == "sft" else rollout.fewest_prompts

    def steps_planned(self, number: int, now_s: float) -> int:
        """Steps that the run will have, if those from `number` on take as long as the last ones."""
        if self.steps is not None:
            return self.steps
        step_s, between_s = self._step_s(number), self._between_s
        free_s = self.left_s(now_s) - self.reserve_s
        steps = (free_s + between_s) / (step_s + between_s) if step_s > 0 else 1
        return number + max(1, int(steps))

    def _step_s(self, number: int) -> float:
        return self.parts.expected_s(step_part(self.config.phase_of(number)))

    @property
    def _between_s(self) -> float:
        """Mean seconds between two steps: checkpoints, validations, exports."""
        return fmean(self.parts.measured.get(BETWEEN_STEPS, [0.0]))

    # --- the learning rate

    def rate(self, number: int, now_s: float) -> float | None:
        """Learning rate of step `number`; None: it follows the learner's schedule by steps.

        With a time budget it decays with the share of the training time that is used: after a
        linear warm-up `lr` times 1 - share (linear), or (1 + cos(pi share)) / 2 (cosine).
        """
        settings, step = self.config.learner, number - self.config.sft_steps
        if not self.config.plans_decay or step < 0:
            return None
        self._train(now_s)
        assert self.time_s is not None
        assert self._trains_from_s is not None
        if step < settings.warmup_steps:
            return settings.lr * (step + 1) / settings.warmup_steps
        # The last step has at least its own share of the time left: no step has a rate of 0.
        left_s = max(self.left_s(now_s) - self.reserve_s, self._step_s(number), 1e-3)
        share = left_s / max(self.time_s - self.reserve_s - self._trains_from_s, left_s)
        if settings.schedule == "cosine":
            share = 0.5 * (1 + math.cos(math.pi * (1 - share)))
        return settings.lr * share

    def _train(self, now_s: float) -> None:
        if self._trains_from_s is None:
            self._trains_from_s = now_s

    # --- the end of the run

    @property
    def reserve_s(self) -> float:
        """Seconds that are kept for the end and for one restart."""
        return self.end_s + self.restart_s

    @property
    def end_s(self) -> float:
        """Seconds after the last step, without slack."""
        return self.parts.expected_s(VALIDATION) + self._exporting_s + self.tests_s

    @property
    def _exporting_s(self) -> float:
        """A checkpoint, loading the best version into the samplers, an export, and the exit."""
        return sum(map(self.parts.expected_s, (CHECKPOINT, SYNC, EXPORT, EXIT)))

    @property
    def exit_s(self) -> float:
        """Seconds after the last record."""
        return self.parts.expected_s(EXIT)

    @property
    def tests_s(self) -> float:
        """Seconds of the final evaluations, without the validation split.

        Answers get longer or shorter during a run. The trend of the validation times tells how
        much; without a validation split that of the steps.
        """
        parts = self.parts
        trend, first = VALIDATION, 1
        if trend not in parts.measured:
            trend, first = step_part("grpo"), _LAST
        began = parts.measured.get(trend, [])[:first]
        drift = parts.expected_s(trend) / max(median_high(began), 1e-9) if began else 1.0
        names = {*parts.estimates, *parts.measured} - {VALIDATION}
        return drift * sum(
            parts.expected_s(name) for name in sorted(names) if name.endswith(_EVALUATION)
        )

    # --- work that can be abandoned, or left out

    def leaving_an_update(self, prompts: int) -> float | None:
        """When the sampling and scoring of a step are abandoned, on the run's clock.

        Leaves the end and an update with so many prompts, which cannot be abandoned, but not the
        time of a restart.
        """
        return self.leaving(self.parts.expected_s(UPDATE) * self._cost(prompts) + self.end_s)

    @property
    def leaving_an_export(self) -> float | None:
        """When an evaluation is abandoned, so that an export is still possible."""
        return self.leaving(self._reserve_for_export_s)

    def leaving(self, seconds: float) -> float | None:
        """When so many seconds are left, on the run's clock; None in a run of steps."""
        return None if self.time_s is None else self.time_s - seconds

    @property
    def _reserve_for_export_s(self) -> float:
        return SAFETY * self._exporting_s

    def allows_validation(self, now_s: float) -> bool:
        """Whether a validation leaves time for an export; tests can be shortened."""
        if not self.is_timed:
            return True
        needed_s = SAFETY * self.parts.expected_s(VALIDATION) + self._reserve_for_export_s
        return needed_s < self.left_s(now_s)

    def during_test(self, *, exported: bool) -> float | None:
        """When the final evaluations are abandoned; `exported`: no export follows them."""
        return self.leaving(self.exit_s if exported else self._reserve_for_export_s)

    def test_share(self, now_s: float, until_s: float | None) -> float:
        """Share of the test prompts that fits into the time until then, at most 1; None: all."""
        if until_s is None:
            return 1.0
        times = (until_s - now_s) / max(self.tests_s, 1e-9)
        return 1.0 if times >= SAFETY else max(0.0, min(_CLOSE, times))

    # --- for the user

    def outlook(self, done: int, now_s: float) -> dict[str, float]:
        """Metrics after `done` steps: planned steps, time left, expected seconds to the end."""
        steps = self.steps_planned(done, now_s) if self.allows_step(done, now_s) else done
        found = {"budget/steps_planned": float(steps)}
        if self.is_timed:
            left_s = max(0.0, self.left_s(now_s))
            return found | {"budget/left_s": left_s, "budget/expected_end_s": left_s}
        steps_s = (steps - done) * (self._step_s(done) + self._between_s)
        return found | {"budget/expected_end_s": steps_s + self.end_s}

    def too_small(self, now_s: float, *, abandoned: bool) -> BudgetTooSmallError:
        """The refusal of a budget into which not one step fits, with the smallest that suffices.

        Args:
            now_s: the time used, which counts when the run is continued.
            abandoned: whether the evaluation before training was abandoned: nobody knows how long
                it would have taken.
        """
        assert self.time_s is not None
        if abandoned:
            minimum_s = max(2 * now_s, self.time_s + self._reserve_for_export_s + self.tests_s)
        else:
            missing_s = self.missing_s(0, now_s, prompts=self._fewest(0))
            minimum_s = self.time_s + missing_s + self.restart_s
        return BudgetTooSmallError(
            f"budget: {show_duration(self.time_s)} leaves no time for a step between the "
            "evaluations and the export, as measured; the minimum is about "
            f"{show_duration(minimum_s)}",
            minimum_s=minimum_s,
        )


def least_run_s(weight_bytes: int) -> float:
    """Lower bound, in seconds, of any run of a model of this size.

    Processes start and compile; the weights are read once, and written and read again for the first
    export and for a better one, at the rate of a fast disk.
    """
    return _START_S + 5 * weight_bytes / _BYTES_PER_S


def show_duration(seconds: float) -> str:
    """A duration in the format of `budget.time`, rounded up to whole seconds."""
    whole = int(-(-seconds // 1))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "m"), (rest, "s")]
    return "".join(f"{amount}{unit}" for amount, unit in parts if amount) or "0s"
