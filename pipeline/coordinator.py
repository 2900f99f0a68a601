"""The training loop: SFT steps if configured, then GRPO steps, and the work between them.

    prompts -> [samplers] -> completions -> [rewards] -> rollouts -> [learner] -> adapter v + 1
                   ^                                                                   |
                   +------------------------------ sync -------------------------------+

    start    mismatch probe, evaluation before training; with a time budget an export, so that
             there is one from now on and the end of the run is measured
    step     data of version v -> update -> sync -> records
    between  validation, export of a better version, checkpoint
    end      checkpoint, validation, export of the best version, test, summary

`Deadline` says what fits into the time (`deadline.py`), the producer makes the data of a step
(`rollout/producer.py`), the workers compute (`rollout/workers.py`). A signal sets `stop`: sampling
and scoring are abandoned, an update finishes, then a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any, Literal

from pipeline.checkpoint_writer import CheckpointWriter
from pipeline.deadline import BETWEEN_STEPS, SYNC
from pipeline.evaluate.exports import Exports
from pipeline.evaluate.schedule import EvaluationSchedule
from pipeline.progress import Progress
from pipeline.rollout.mismatch import check_mean
from pipeline.rollout.producer import RolloutProducer
from pipeline.rollout.rollout_step import RolloutStep
from pipeline.rollout.workers import Interrupted, OutOfTime, TrainingStopped
from pipeline.run.profile import Profiler
from pipeline.run_context import RunContext
from pipeline.step_recorder import StepRecorder
from pipeline.types import AdapterRef, TrainStep

REFUSED = "refused"
"""Journal event: not one step fits into the budget."""


class Coordinator:
    """One process of a run, from the mismatch probe to the summary; continues at `progress`."""

    def __init__(self, run: RunContext, progress: Progress) -> None:
        self.context = run
        self.config = run.config
        self.workers = run.workers
        self.records = run.records
        self.phases = run.phases
        self.deadline = run.deadline
        self.progress = progress
        self.producer = RolloutProducer(run)
        self.schedule = EvaluationSchedule(run)
        self.exports = Exports(run, self.schedule)
        self.checkpoints = CheckpointWriter(run)
        self.recorder = StepRecorder(run, self.schedule)
        self.profiler = Profiler(run)
        rows, entries = run.folder.metrics, list(run.folder.entries())
        self.deadline.recall(rows, entries)
        was_refused = any(entry["event"] == REFUSED for entry in entries)
        self._may_refuse = progress.step == 0 and (was_refused or not run.clock.used_before_s)
        self._saved_at_s = self._now_s
        last = max(self.schedule.validated, default=0)
        at_s = (row["time/elapsed_s"] for row in rows if row["step"] == last)
        self._validated_at_s = next(at_s, 0.0)

    async def run(self) -> Literal["finished", "interrupted"]:
        """Runs the training loop and what is around it.

        Raises:
            MismatchError: if sampler and learner are not the same policy.
            OutOfMemory: if a process runs out of memory.
            TrainingStopped: if an alarm or an error of a reward stops the run, or too many updates
                were skipped; a checkpoint is written first.
            BudgetTooSmallError: if not one step fits into a time budget.
        """
        with self.phases.during("coordination"):
            try:
                return await self._run()
            finally:
                await self.profiler.close()

    async def _run(self) -> Literal["finished", "interrupted"]:
        try:
            await self._start()
            while step := self._next_step():
                try:
                    await self._train(step)
                except OutOfTime:
                    self._abandoned("the training step")
                    break
                if not await self._between_steps():
                    break
            await self._finish()
        except Interrupted:
            await self._save()
            await self.checkpoints.settle()
            self.recorder.summarize(self.progress, ended="interrupted")
            return "interrupted"
        except TrainingStopped:
            await self._save()
            await self.checkpoints.settle()
            raise
        return "finished"

    # --- the start

    async def _start(self) -> None:
        """The mismatch probe and the evaluation before training; with a budget of time an export.

        Raises:
            BudgetTooSmallError: if not one step fits.
        """
        self.records.best(self.schedule.best)
        await self._perform("probe", self._check_mismatch())
        # A restart repeats most of what is done up to here.
        started_s = self._now_s - self.context.clock.used_before_s
        self.deadline.restart_s = started_s - self.deadline.once_s
        evaluating = self.schedule.evaluate_before(
            self.progress.step, self.deadline.leaving_an_export
        )
        in_time = await self._perform(
            "evaluation", evaluating, abandoned="the evaluation before training"
        )
        has_export = self.exports.current or self.exports.is_behind
        if in_time and self.deadline.is_timed and not has_export:
            await self._export("current", reason="first")
        if in_time and self._validation_is_due():
            in_time = await self._validate()
        await self._perform("checkpoint", self.schedule.recover_best())
        if self.deadline.is_timed:
            answers = self.config.eval.samples * len(self.context.data.test.prompts)
            self.deadline.estimate_step(answers=answers)
            self._refuse_too_small(abandoned=not in_time)
            await self._export_if_better()

    async def _check_mismatch(self) -> None:
        bound = self.config.mismatch_bounds.probe
        largest = await self.workers.probe(self.context.data.train.prompts)
        self.records.event(
            "mismatch",
            f"mismatch: sampler and learner differ by {largest:.2g} of what a random adapter "
            f"changes, allowed {bound:g}",
            largest=largest,
            bound=bound,
        )
        began_s = self._now_s
        await self.workers.publish()
        self.deadline.parts.observe(SYNC, self._now_s - began_s)

    def _refuse_too_small(self, *, abandoned: bool) -> None:
        """Refuses a budget of time into which not one step fits, if no process has trained yet.

        Args:
            abandoned: whether the work before the first step was abandoned.

        Raises:
            BudgetTooSmallError: naming the minimum.
        """
        now_s = self._now_s
        if not self._may_refuse or (self.deadline.allows_step(0, now_s) and not abandoned):
            return
        error = self.deadline.too_small(now_s, abandoned=abandoned)
        self.records.journal(REFUSED, minimum_s=error.minimum_s, elapsed_s=now_s)
        raise error

    # --- a step

    def _next_step(self) -> TrainStep | None:
        """The next training step; None: no other fits into the budget."""
        number, now_s, deadline = self.progress.step, self._now_s, self.deadline
        if not deadline.allows_step(number, now_s):
            return None
        prompts = deadline.prompts_that_fit(number, now_s)
        return TrainStep(
            number,
            prompts,
            self.config.phase_of(number),
            rate=deadline.rate(number, now_s),
            deadline=deadline.leaving_an_update(prompts),
        )

    async def _train(self, step: TrainStep) -> None:
        """Data -> update -> publish -> records.

        Raises:
            OutOfTime: if the step is abandoned.
        """
        await self.profiler.begin(step.number + 1)
        await self.workers.uses()  # seconds of devices count in steps only
        during = self.phases.during
        data = await self.producer.take(step, self.progress.sampling)
        metrics: dict[str, float] = {}
        if isinstance(data, RolloutStep):
            metrics = data.metrics(self.config)
            self.recorder.check_rewards(data, metrics)
        with during("sample"):  # after the update the learner waits for rollouts sampled ahead
            async with self.producer.ahead(self._step_ahead(step), data.next_state):
                with during("learn"):
                    learned = await self.workers.update(data, step)
        check_mean(learned, bound=self.config.mismatch_bounds.mean_stop)
        syncing_s = self._now_s
        with during("sync"):
            await self.workers.publish()
        self.deadline.parts.observe(SYNC, self._now_s - syncing_s)
        uses = await self.workers.uses()
        await self.profiler.end(step.number + 1)
        progress = data.counted(self.progress.after_update(learned))
        self.progress = replace(progress, step=step.number + 1)
        self.recorder.record(
            data,
            sampled=metrics,
            learned=learned,
            uses=uses,
            progress=self.progress,
        )

    def _step_ahead(self, step: TrainStep) -> TrainStep | None:
        """The step whose rollouts are sampled during the update of `step`; None: none."""
        if step.phase == "sft" or self.config.rollout.ahead == "off":
            return None
        if not self.deadline.allows_step(step.number + 1, self._now_s):
            return None
        return TrainStep(step.number + 1, step.prompts, deadline=step.deadline)

    # --- between two steps

    async def _between_steps(self) -> bool:
        """Validation, export of a better version, checkpoint; returns whether to go on."""
        began_s = self._now_s
        await self.checkpoints.settle(wait=False)
        if self._validation_is_due() and not await self._validate():
            return False
        if self.deadline.is_timed:
            await self._export_if_better()
        step, settings = self.progress.step, self.config.checkpoint
        is_due = step % settings.every_steps == 0
        if is_due or self._now_s - self._saved_at_s >= settings.every_s:
            self._saved_at_s = self._now_s
            await self._perform("checkpoint", self._save())
        self.deadline.parts.observe(BETWEEN_STEPS, self._now_s - began_s)
        # Validating what seems to be the last version may leave time for one more step.
        if self.deadline.is_timed and not self.deadline.allows_step(step, self._now_s):
            await self._validate_last()
        return True

    def _validation_is_due(self) -> bool:
        """Whether to validate the current version."""
        config, step = self.config, self.progress.step
        if not config.validates or step in self.schedule.validated:
            return False
        if step == 0:
            return True
        if config.validation_steps is not None:
            return step % config.validation_steps == 0
        assert config.validation_minutes is not None
        return self._now_s - self._validated_at_s >= 60 * config.validation_minutes

    async def _validate(self) -> bool:
        """Validates the current version; returns whether it was in time."""
        validating = self.schedule.validate(
            self.progress.step, self.deadline.leaving_an_export, save=self._save
        )
        if not await self._perform("evaluation", validating, abandoned="the validation"):
            return False
        self._validated_at_s = self._now_s
        return True

    async def _validate_last(self) -> None:
        """Validates the current version, if it is not validated and there is time."""
        is_validated = self.progress.step in self.schedule.validated
        if not self.config.validates or is_validated:
            return
        if self.deadline.allows_validation(self._now_s):
            await self._validate()

    async def _export_if_better(self) -> None:
        """Exports the best version if it is not the exported one."""
        if self.exports.is_behind:
            await self._export(self.exports.best(self.progress.step), reason="better")

    # --- the end

    async def _finish(self) -> None:
        """Validates the last version, exports and evaluates the best one, as time permits.

        There is an export in any case. A version that is not evaluated replaces no other.
        """
        await self._perform("checkpoint", self._save())
        await self._validate_last()
        self.recorder.judge_last_validation()
        await self._perform("sync", self.schedule.load_best(self.progress.step))
        best = self.schedule.best is not None
        if self.deadline.is_timed and best and not self.exports.is_loaded:
            await self._export(self.exports.best(self.progress.step), reason="best")
        until = self.deadline.during_test(exported=best and self.deadline.is_timed)
        share = self.deadline.test_share(self._now_s, until)
        with self.phases.during("evaluation"):
            compared = await self.schedule.test(self.progress.step, until, share=share)
        if not self.deadline.is_timed:
            await self._export(self.exports.best(self.progress.step), reason="last")
        elif not (best or self.exports.is_loaded) and (
            "after" in compared or self.exports.current is None
        ):
            await self._export("current", reason="last")
        await self.checkpoints.settle()
        self._summarize(compared)

    def _summarize(self, compared: Mapping[str, Any]) -> None:
        """Writes the summary of the whole run; partial rollouts are dropped."""
        progress, best = self.progress, self.schedule.best_facts
        dropped = progress.dropped + len(progress.sampling.partial)
        progress = replace(progress, dropped=dropped)
        more: dict[str, Any] = {} if best is None else {"best": best}
        more |= self.exports.untrained(progress.step)
        self.recorder.summarize(progress, ended="finished", eval=compared, **more)

    # --- exports and checkpoints

    async def _export(self, which: AdapterRef, *, reason: str) -> None:
        await self._perform("export", self.exports.export(which, reason=reason))

    async def _save(self) -> None:
        await self.checkpoints.save(self.progress)

    # --- work around the steps

    async def _perform(self, phase: str, work: Awaitable[None], *, abandoned: str = "") -> bool:
        """Does work that is no training step.

        Args:
            phase: of the run meanwhile.
            work: may raise `OutOfTime`, if it has a deadline.
            abandoned: what it is called if it is abandoned.

        Returns:
            Whether it was finished before its deadline.
        """
        in_time = True
        try:
            with self.phases.during(phase):
                await work
        except OutOfTime:
            self._abandoned(abandoned)
            in_time = False
        self.records.best(self.schedule.best)
        return in_time

    def _abandoned(self, what: str) -> None:
        self.records.event(
            "abandoned",
            f"{what} is abandoned: the remaining time is needed for the end of the run",
            what=what,
            step=self.progress.step,
            elapsed_s=self._now_s,
        )

    @property
    def _now_s(self) -> float:
        return self.context.now_s
