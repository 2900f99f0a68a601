"""The deadline of a run: measured seconds of its parts, and which work still fits.

    measured parts -> seconds of the next step, of the end of the run, of a restart
                   -> allows another step? with how many prompts? how much of the test?

The training loop asks with plain `if`s (`pipeline/coordinator.py`). All clock readings are
arguments: `now_s` is the time that the run has used, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

from configs.schema import Config

EXPORT, CHECKPOINT, SYNC, EXIT = "export", "checkpoint", "sync", "exit"
VALIDATION = "validation evaluation"
"""Parts of the end of a run whose seconds are estimated, then measured."""
SAFETY = 1.2
"""A part of the end may take this many times its last measurement."""
IDLE_SHARE = 0.02
"""Share of the budget that slack may leave unused."""
_TEST_MARGIN = 0.2
"""Relative margin for the final evaluations."""
_UPDATE_PER_SAMPLING = 1.5
"""Assumed duration of an update relative to its sampling, until one was measured."""
_STEP_PER_SAMPLING = 2.0
"""Assumed duration of a step relative to its sampling, until one was measured."""
_FIXED = 0.2
"""Share of a step's time that does not shrink with its prompts."""
_CLOSE = 0.9999
_UNFORESEEN = 0.01
"""Share of the budget reserved for unforeseen delays."""
_LAST, _STALL = 3, 1.5
_GROWTH = (0.67, 1.5)
_EVALUATION = " evaluation"
_START_S = 20.0
_BYTES_PER_S = 2e9
_MINUTE_S = 60.0


class BudgetTooSmallError(ValueError):
    """Not one step fits into the budget.

    Attributes:
        minimum_s: the smallest budget that is known to suffice.
    """

    def __init__(self, message: str, *, minimum_s: float) -> None:
        super().__init__(message)
        self.minimum_s = minimum_s


def evaluation_part(name: str) -> str:
    """The part of the end of a run that evaluates a split."""
    return f"{name}{_EVALUATION}"


@dataclass
class StepTimes:
    """Seconds of the next training step, or of its update.

    The median of the last three steps ignores a single stalled step; a trend over the last six
    steps is extrapolated.

    Attributes:
        estimate_s: seconds of a full step until one was measured.
        between_s: mean seconds between two steps without validations: checkpoints, exports.
    """

    estimate_s: float = 0.0
    between_s: float = 0.0
    _steps: list[float] = field(default_factory=list)
    _phase: str = ""
    _between: int = 0

    def observe(self, seconds: float, *, share: float = 1.0, phase: str = "grpo") -> None:
        """Adds a step with `share` of the usual prompts; another phase starts a new series."""
        if phase != self._phase:
            self._steps, self._phase = [], phase
        self._steps.append(seconds / _cost(share))

    def observe_between(self, seconds: float) -> None:
        """Adds the time between two steps, without validations."""
        self._between += 1
        self.between_s += (seconds - self.between_s) / self._between

    def expected_s(self, *, share: float = 1.0, phase: str = "grpo") -> float:
        """Seconds of the next step if it has `share` of the usual prompts."""
        if phase != self._phase or not self._steps:
            return self.estimate_s * _cost(share)
        now, before = self._steps[-_LAST:], self._steps[-2 * _LAST : -_LAST]
        seconds = median_high(now)
        if before:
            growth = (seconds / max(median_high(before), 1e-9)) ** (1 / _LAST)
            # The median of the last three steps is centred two steps before the next one.
            seconds *= min(max(growth, _GROWTH[0]), _GROWTH[1]) ** 2
        return seconds * _cost(share)

    @property
    def drift(self) -> float:
        """Duration of the last steps relative to the first ones."""
        if not self._steps:
            return 1.0
        now, first = median_high(self._steps[-_LAST:]), self._steps[:_LAST]
        middle = max(median_high(first), 1e-9)
        # The drift may start with the first step, or the first step may be a stall.
        began = min(first) if now > middle else min(max(first), _GROWTH[1] * middle)
        return now / max(began, 1e-9)


def _cost(share: float) -> float:
    return _FIXED + (1 - _FIXED) * share


@dataclass
class PartTimes:
    """Seconds of each part of the end: validation, export, checkpoint, tests, exit.

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
        """Expected seconds of a part."""
        return _next(self.measured[part]) if part in self.measured else self.estimates.get(part, 0)

    def tests_s(self, *, drift: float = 1.0) -> float:
        """Expected seconds of the final evaluations, without the validation split.

        Answers get longer or shorter during a run. The trend of the validation times tells how
        much; without a validation split `drift` does.
        """
        validations = self.measured.get(VALIDATION)
        if validations:
            drift = _next(validations) / max(validations[0], 1e-9)
        parts = {*self.estimates, *self.measured} - {VALIDATION}
        return drift * sum(
            self.expected_s(part) for part in sorted(parts) if part.endswith(_EVALUATION)
        )


def _next(seconds: Sequence[float]) -> float:
    """The last measurement, bounded by the recent ones: a stall is not expected again."""
    return min(seconds[-1], _STALL * median_high(seconds[-_LAST:]))


@dataclass
class Deadline:
    """Whether another step may start, its size, and when work is abandoned.

    A run of steps counts steps. A run with a time budget starts a step if the step and what has to
    follow fit into the remaining time: checkpoint, validation, export, final evaluations, and one
    restart of the run's process. Some slack is kept, but at most `IDLE_SHARE` of the budget or a
    step stays idle. Work that takes longer than expected uses the slack first and then shortens the
    final evaluation (see `test_share`), which comes after the export.

    Attributes:
        config: of the run.
        steps: number of steps; None: the budget is time.
        time_s: seconds of the budget; None: the budget is steps.
        until_s: the deadline in seconds since 1970, if it was given as an instant.
        parts: seconds of each part of the end.
        step_times: seconds of training steps.
        update_times: seconds of the updates in them.
        restart_s: seconds that a restart of the run's process takes: as long as its start took.
    """

    config: Config
    steps: int | None
    time_s: float | None
    until_s: float | None = None
    parts: PartTimes = field(default_factory=PartTimes)
    step_times: StepTimes = field(default_factory=StepTimes)
    update_times: StepTimes = field(default_factory=StepTimes)
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
        """Adds what earlier processes of the run have measured.

        Args:
            rows: metrics of the steps.
            entries: the journal.
        """
        for row in rows:
            self.observe(row)
        for entry in entries:
            if entry["event"] in {"reserved", CHECKPOINT}:
                self.parts.observe(entry.get("reason", CHECKPOINT), entry["seconds"])

    def observe(self, row: Mapping[str, Any]) -> None:
        """Adds the seconds of a training step and of its update, by its metrics."""
        phase = self.config.phase_of(row["step"] - 1)
        prompts = row.get("rollout/prompts_planned", self.config.rollout.prompts_per_step)
        share = self._share(prompts, phase)
        if phase == "grpo":
            self.update_times.observe(row["time/learn_s"], share=share)
            self._train(row["time/elapsed_s"] - row["time/step_s"])
        self.step_times.observe(row["time/step_s"], share=share, phase=phase)

    def estimate_step(self, *, answers: int) -> None:
        """Estimates a step from the evaluation before training, until one was measured.

        Args:
            answers: number of answers of the test split.
        """
        each_s = self.parts.expected_s(evaluation_part("test")) / max(answers, 1)
        self.step_times.estimate_s = _STEP_PER_SAMPLING * each_s * self.config.rollout.size

    # --- another step

    def allows_step(self, number: int, now_s: float) -> bool:
        """Whether step `number`, counted from 0, can finish in time."""
        if self.steps is not None:
            return number < self.steps
        return self.prompts_that_fit(number, now_s) > 0

    def prompts_that_fit(self, number: int, now_s: float) -> int:
        """Prompts of the largest step `number` that can finish in time; 0: none can.

        A step of the SFT phase has one size.
        """
        most, phase = self.config.rollout.prompts_per_step, self.config.phase_of(number)
        if not self.is_timed:
            return most
        fewest = most if phase == "sft" else self.config.rollout.fewest_prompts
        for prompts in range(most, fewest - 1, -1):
            if self.missing_s(prompts, now_s, phase=phase) <= 0:
                return prompts
        return 0

    def missing_s(self, prompts: int, now_s: float, *, phase: str = "grpo") -> float:
        """Seconds by which a step with so many prompts, and the end, exceed the time left."""
        step_s = self.step_times.expected_s(share=self._share(prompts, phase), phase=phase)
        return step_s + self.reserve_s + self._slack_s(step_s) - self.left_s(now_s)

    def allows_update(self, prompts: int, *, sampled_s: float, now_s: float) -> bool:
        """Whether the update of a sampled GRPO step, and an export after it, can finish in time.

        An update cannot be abandoned.

        Args:
            prompts: of the step.
            sampled_s: seconds that sampling and rewards took.
            now_s: the time used.
        """
        if not self.is_timed:
            return True
        expected_s = self.update_times.expected_s(share=self._share(prompts, "grpo"))
        needed_s = (expected_s or _UPDATE_PER_SAMPLING * sampled_s) + self.end_s - self.tests_s
        return needed_s <= self.left_s(now_s)

    def steps_planned(self, number: int, now_s: float) -> int:
        """Steps that the run will have, if those from `number` on take as long as the last ones."""
        if self.steps is not None:
            return self.steps
        step_s = self.step_times.expected_s(phase=self.config.phase_of(number))
        between_s, validation_s = self.step_times.between_s, self.parts.expected_s(VALIDATION)
        free_s = self.left_s(now_s) - self.reserve_s - self._slack_s(step_s + between_s)
        minutes, every = self.config.validation_minutes, self.config.validation_steps
        if minutes is not None:
            # Of this much time, the steps and what is between them have the rest.
            free_s *= 1 - validation_s / (validation_s + _MINUTE_S * minutes)
        elif every is not None:
            between_s += validation_s / every
        steps = (free_s + between_s) / (step_s + between_s) if step_s > 0 else 1
        return number + max(1, int(steps))

    def _share(self, prompts: float, phase: str) -> float:
        """A step's prompts as a share of a full step."""
        return 1.0 if phase == "sft" else prompts / self.config.rollout.prompts_per_step

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
        left_s = max(self.left_s(now_s) - self.reserve_s, self.step_times.expected_s(), 1e-3)
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
        validation_s = self.parts.expected_s(VALIDATION) if self.config.validates else 0.0
        return validation_s + self.export_s + self._writing_s + self.tests_s

    @property
    def export_s(self) -> float:
        """Expected seconds of an export."""
        return self.parts.expected_s(EXPORT)

    @property
    def _writing_s(self) -> float:
        """A checkpoint, loading the best version into the samplers, and the exit."""
        return self.parts.expected_s(CHECKPOINT) + self.parts.expected_s(SYNC) + self.exit_s

    @property
    def exit_s(self) -> float:
        """Seconds after the last record."""
        return self.parts.expected_s(EXIT)

    @property
    def tests_s(self) -> float:
        """Seconds of the final evaluations."""
        return self.parts.tests_s(drift=self.step_times.drift)

    def _slack_s(self, step_s: float) -> float:
        assert self.time_s is not None
        uncertain_s = self.end_s - self.exit_s
        wanted_s = (SAFETY - 1) * uncertain_s + _UNFORESEEN * self.time_s
        validation_s = self.parts.expected_s(VALIDATION) if self.config.validates else 0.0
        return min(wanted_s, max(0.0, IDLE_SHARE * self.time_s - step_s - validation_s))

    # --- work that can be abandoned, or left out

    def during_step(self, *, validated: bool, exported: bool) -> float | None:
        """When the sampling and scoring of a step are abandoned, in seconds on the run's clock.

        Args:
            validated: whether the version that samples is validated, or need not be.
            exported: whether the best version is the exported one.
        """
        margin_s = _TEST_MARGIN * self.tests_s
        if self.config.validates and not validated:
            return self.leaving(self.end_s + margin_s)
        if not exported or not self.config.validates:
            return self.leaving(self._reserve_for_export_s + self.tests_s)
        return self.leaving(self._writing_s + self.tests_s + margin_s)

    @property
    def leaving_an_export(self) -> float | None:
        """When an evaluation is abandoned, so that an export is still possible."""
        return self.leaving(self._reserve_for_export_s)

    def leaving(self, seconds: float) -> float | None:
        """When so many seconds are left, on the run's clock; None in a run of steps."""
        return None if self.time_s is None else self.time_s - seconds

    @property
    def _reserve_for_export_s(self) -> float:
        return SAFETY * (self.export_s + self._writing_s)

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
        """Metrics after `done` steps: planned steps, time left, seconds to the end.

        The end of a run of steps is an estimate without validations.
        """
        steps = self.steps_planned(done, now_s) if self.allows_step(done, now_s) else done
        found = {"budget/steps_planned": float(steps)}
        if self.is_timed:
            left_s = max(0.0, self.left_s(now_s))
            return found | {"budget/left_s": left_s, "budget/expected_end_s": left_s}
        step_s = self.step_times.expected_s(phase=self.config.phase_of(done))
        steps_s = (steps - done) * (step_s + self.step_times.between_s)
        return found | {"budget/expected_end_s": steps_s + self.end_s}

    def too_small(
        self, now_s: float, *, began_s: float, used_before_s: float, abandoned: bool, exported: bool
    ) -> BudgetTooSmallError:
        """The refusal of a budget into which not one step fits, with the smallest that suffices.

        Args:
            now_s: the time used.
            began_s: when this process had started.
            used_before_s: by earlier processes, which a new run would not repeat.
            abandoned: whether the evaluation before training was abandoned: nobody knows how long
                it would have taken.
            exported: whether the untrained policy is exported.
        """
        assert self.time_s is not None
        if abandoned:
            minimum_s = max(2 * now_s, self.time_s + self._reserve_for_export_s + self.tests_s)
        else:
            fewest, phase = self.config.rollout.fewest_prompts, self.config.phase_of(0)
            minimum_s = self.time_s - used_before_s + self.missing_s(fewest, now_s, phase=phase)
        least, least_here = show_duration(minimum_s), show_duration(minimum_s + began_s)
        return BudgetTooSmallError(
            f"budget: {show_duration(self.time_s)} leaves no time for a step between the "
            f"evaluations and the export, as measured; the minimum is about {least}, or "
            f"{least_here} to continue in this run folder"
            + ("; the untrained policy is exported" if exported else ""),
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
