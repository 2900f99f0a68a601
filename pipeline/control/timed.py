"""What only a run with a budget of time does: rehearse the end, plan, stop in time, end in order.

A run of steps goes the same way and is held up nowhere. The order at the end is by what must not be
missing: checkpoint, validation of the last version, export of the best one, evaluation of what is
exported, as long as there is time for it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from configs.schema import Config
from pipeline.contracts.clock import Stopwatch
from pipeline.control.budget import show_duration
from pipeline.control.deadline import BudgetTooSmallError, Deadline
from pipeline.control.reserve import CHECKPOINT, SYNC, VALIDATION, evaluation
from pipeline.control.step_planner import StepPlanner, plans_in_force
from pipeline.evaluate.evaluation import Evaluation
from pipeline.evaluate.exports import Exports
from pipeline.evaluate.schedule import EvaluationSchedule, Result
from pipeline.rollout.team import OutOfTime, Team
from pipeline.run.records import Records

_ENOUGH = 0.2
"""Share of the evaluations at the end that they may take longer than expected."""
_AS_MUCH_AGAIN = 2.0
"""Until a step was measured learning is taken to need as long as sampling."""


class Validate(Protocol):
    """Reads the validation split if that is due."""

    async def __call__(self, *, last: bool = False) -> None:
        """It always is for the last version."""


class Timed:
    """One process's dealings with the clock.

    Args:
        config: of the run.
        examiner: evaluates.
        team: works.
        records: where decisions are written down, and found again after a resume.
        deadline: the clock, and what is known of how long things take.
        step: where the run goes on.
    """

    def __init__(
        self,
        config: Config,
        *,
        examiner: EvaluationSchedule,
        team: Team,
        records: Records,
        deadline: Deadline,
        step: int,
    ) -> None:
        self._config = config
        self._examiner = examiner
        self._records = records
        self._deadline = deadline
        self._on = deadline.time_s is not None
        self._began_s = deadline.clock.elapsed_s
        self._planned_before = any(True for _ in records.folder.events("planned"))
        self._saved = -1
        for entry in records.folder.events("checkpoint"):
            self.saved(entry["step"], entry["seconds"])
        entries = plans_in_force(records.folder.entries())
        self._horizon = StepPlanner(config, entries=entries, step=step)
        self.exports = Exports(examiner, team=team, records=records, deadline=deadline)

    # --- before the first step

    async def rehearse(
        self, step: int, validate: Validate, save: Callable[[], Awaitable[None]]
    ) -> dict[str, Evaluation]:
        """Does before the first step what comes after the last one, so that its time is known.

        What the end needs and the run folder has lost is measured again.

        Returns:
            The evaluation before.

        Raises:
            BudgetTooSmallError: if not one step fits into the budget.
        """
        if not self._on:
            before = await self._examiner.before(step)
            await validate()
            await self._examiner.repair(step, save=save)
            return before
        try:
            with self._deadline.keeping(self._deadline.keep_for_export_s(tests=False)):
                before = await self._examiner.before(step)
            await self.exports.rehearse()
            with self._deadline.keeping(self._deadline.keep_for_export_s(tests=False)):
                await validate()
                await self._examiner.repair(step, save=save)
        except OutOfTime:
            if self._may_refuse(step):
                # How long it would have taken is not known.
                more_s = self._deadline.keep_for_export_s(tests=True)
                time_s = self._deadline.time_s or 0.0
                self._refuse(max(2 * self._deadline.clock.elapsed_s, time_s + more_s))
            self.abandoned("the validation", step)
            before = self._examiner.recorded_before()
            await self._examiner.recover_best(step, save=save)
        answers = self._config.eval.samples * max(1, self._examiner.test_prompts)
        each_s = self._deadline.reserve.part_s(evaluation("test")) / answers
        self._deadline.pace.estimate_s = _AS_MUCH_AGAIN * each_s * self._config.rollout.size
        missing_s = self._deadline.missing_s(self._deadline.prompts[1], kind=self._kind(step))
        if missing_s > 0 and self._may_refuse(step):
            assert self._deadline.time_s is not None
            self._refuse(self._deadline.time_s - self._deadline.clock.used_before_s + missing_s)
        await self.exports.follow(step)
        return before

    def _may_refuse(self, step: int) -> bool:
        """Not once there is something to end in order: what was learned, or what was decided."""
        return step == 0 and not self._planned_before

    def _refuse(self, minimum_s: float) -> None:
        clock, time_s = self._deadline.clock, self._deadline.time_s
        assert time_s is not None
        # The same run has used what it has used, and has to start once more.
        again_s = minimum_s + self._began_s
        self._records.folder.journal("refused", minimum_s=minimum_s, elapsed_s=clock.elapsed_s)
        exported = "; the untrained policy is exported" if self.exports.version == 0 else ""
        raise BudgetTooSmallError(
            f"budget: {show_duration(time_s)} leave no time for a step between the evaluations and "
            f"the export, as measured; the minimum is about {show_duration(minimum_s)}, or "
            f"{show_duration(again_s)} to go on in this run folder{exported}",
            minimum_s=minimum_s,
        )

    # --- step by step

    def allows(self, step: int) -> bool:
        """Whether another step may start; if so it is planned."""
        kind = self._kind(step)
        if not self._deadline.allows(step, kind=kind):
            return False
        if self._on:
            new = self._horizon.decide(
                step,
                steps_left=self._deadline.steps_left(partial(self._validations, step), kind=kind),
                prompts=self._deadline.size(kind=kind),
            )
            if new is not None:
                self._records.planned(
                    new,
                    full=self._config.rollout.prompts_per_step,
                    step_s=self._deadline.pace.expected_s(kind=kind),
                    elapsed_s=self._deadline.clock.elapsed_s,
                )
        return True

    @property
    def prompts(self) -> int:
        """Prompts of the step that was allowed last."""
        return self._horizon.prompts if self._on else self._config.rollout.prompts_per_step

    @property
    def rate(self) -> float | None:
        """Its learning rate, if it is planned."""
        return self._horizon.rate if self._config.plans_decay else None

    @property
    def metrics(self) -> dict[str, float]:
        """What a step's metrics say of the time."""
        found = {"time/elapsed_s": self._deadline.clock.elapsed_s}
        return found | ({"rollout/prompts_planned": float(self.prompts)} if self._on else {})

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measures a step; abandons its sampling when the end has to begin without it."""
        watch = Stopwatch(self._deadline.clock.now)
        with self._deadline.keeping(self._keep_s(step)):
            yield
        kind = self._kind(step)
        self._deadline.pace.observe(watch.total_s, share=self._share(kind), kind=kind)

    @contextmanager
    def update(self, sampled_s: float) -> Iterator[None]:
        """Measures an update, which cannot be abandoned.

        Raises:
            OutOfTime: before it begins, if there is no time for it and for what has to follow.
        """
        share = self._share("grpo")
        if self._on and self._deadline.missing_for_update_s(sampled_s, share=share) > 0:
            raise OutOfTime
        watch = Stopwatch(self._deadline.clock.now)
        yield
        self._deadline.updates.observe(watch.total_s, share=share)

    def _keep_s(self, step: int) -> float:
        """What is needed at the end if nothing more is learned."""
        if self._examiner.is_due(step, last=True):
            return self._deadline.end_s + _ENOUGH * self._deadline.tests_s
        if self.exports.pending or not self._config.eval.validates:
            return self._deadline.keep_for_export_s(tests=True)
        return self._deadline.closing_s + _ENOUGH * self._deadline.tests_s

    @contextmanager
    def between(self) -> Iterator[None]:
        """Measures what is done between two steps; a validation comes before long tests."""
        watch, known = Stopwatch(self._deadline.clock.now), len(self._validations_s)
        with self._deadline.keeping(self._deadline.keep_for_export_s(tests=False)):
            yield
        self._deadline.pace.observe_between(watch.total_s - sum(self._validations_s[known:]))

    async def follow(self, step: int) -> None:
        """Brings the export up to date after a better validation."""
        if self._on:
            await self.exports.follow(step)

    def saved(self, step: int, seconds: float) -> None:
        """Takes note of how long a checkpoint took; one of the same step is not written again."""
        if step != self._saved:
            self._deadline.reserve.observe(CHECKPOINT, seconds)
        self._saved = step

    def synced(self, seconds: float) -> None:
        """Takes note of how long it takes to bring an adapter to the samplers."""
        self._deadline.reserve.observe(SYNC, seconds)

    # --- after the last step

    async def end(self, step: int, before: dict[str, Evaluation], validate: Validate) -> Result:
        """Validates what was learned, exports the best version, evaluates it, while there is time.

        There is an export in any case, and what is exported at last has been evaluated if anything
        has: a version that nothing has measured does not replace one that something has.
        """
        deadline, examiner = self._deadline, self._examiner
        if not self._on:
            await validate(last=True)
            result = await examiner.after(step, before=before)
            await self.exports.export(result.which, reason="last")
            return result
        await self._validate_last(step, validate)
        recalled = await examiner.recall(step)
        if recalled[1] is not None and not self.exports.in_force:
            await self.exports.export(recalled[0], reason="best")
        evaluated = recalled[1] is not None
        keep_s = deadline.exit_s if evaluated else deadline.keep_for_export_s(tests=False)
        with deadline.keeping(keep_s):
            share = deadline.evaluated_share(keep_s=keep_s)
            result = await examiner.test(step, recalled, before=before, share=share)
        better = result.tested or not self.exports.measured
        if not evaluated and not self.exports.in_force and better:
            await self.exports.export(result.which, reason="last")
        return result

    async def last_look(self, step: int, validate: Validate) -> None:
        """Validates what seems to be the last version: it may leave time for one more."""
        if self._on and not self._deadline.allows(step, kind=self._kind(step)):
            await self._validate_last(step, validate)

    async def _validate_last(self, step: int, validate: Validate) -> None:
        deadline = self._deadline
        if deadline.has_time_to_validate():
            try:
                with deadline.keeping(deadline.keep_for_export_s(tests=False)):
                    await validate(last=True)
            except OutOfTime:
                self.abandoned("the last validation", step)

    def abandoned(self, what: str, step: int) -> None:
        """Writes down that something took too long to be waited for."""
        self._records.event(
            "abandoned",
            f"{what} is abandoned: what time is left is needed for the end",
            what=what,
            step=step,
            elapsed_s=self._deadline.clock.elapsed_s,
        )

    def _validations(self, step: int, steps: int) -> int:
        """How many are due between `steps` steps, the first of which is number `step`."""
        settings = self._config.eval
        if settings.every_minutes is not None:
            step_s = self._deadline.pace.expected_s(kind=self._kind(step))
            # It is due after the step in which the minutes are over.
            every = math.ceil(60 * settings.every_minutes / step_s) if step_s > 0 else steps
            return (steps - 1) // every
        if not settings.every_steps:
            return 0
        return (step + steps - 1) // settings.every_steps - step // settings.every_steps

    @property
    def _validations_s(self) -> Sequence[float]:
        return self._deadline.reserve.measured.get(VALIDATION, ())

    def _share(self, kind: str) -> float:
        """Of a whole step, what the one that was allowed last is."""
        return 1.0 if kind == "sft" else self.prompts / self._config.rollout.prompts_per_step

    def _kind(self, step: int) -> str:
        return "sft" if step < self._config.sft_steps else "grpo"
