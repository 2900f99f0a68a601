"""The training loop: SFT steps if configured, then GRPO steps, and the duties between them.

    prompts -> [samplers] -> completions -> [rewards] -> rollouts -> [learner] -> adapter v + 1
                   ^                                                                   |
                   +------------------------------ sync -------------------------------+

    each step   produces   the data of version v, then version v + 1
                waits for  the data of the step, the update, the sync
    duties      start of the run, requests, validations, exports, checkpoints, end of the run

The controller decides (`control/controller.py`), the producer produces the data of a step
(`rollout/producer.py`), the workers compute (`rollout/workers.py`). A signal sets `stop`: sampling
and scoring are abandoned, an update finishes, then a checkpoint is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from configs.schema import Config
from pipeline.contracts.clock import Clock, Stopwatch
from pipeline.contracts.decisions import CHECKPOINT, EXPORT, SYNC, Decision, JournalEntry, TrainStep
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.progress import Progress
from pipeline.control.controller import RunController
from pipeline.control.deadline import Deadline
from pipeline.control.duties import PHASES, BestVersion, Duty, DutyKind, Exported, RunStatus
from pipeline.evaluate.exports import Exports
from pipeline.evaluate.schedule import EvaluationSchedule
from pipeline.inputs.dataset.splits import LoadedData
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.report.ledger_lines import ledger_lines
from pipeline.report.meter import RunMeter
from pipeline.report.profile import Profiler
from pipeline.rollout.checkpoints import Checkpoints
from pipeline.rollout.parity import check_mean
from pipeline.rollout.producer import RolloutProducer
from pipeline.rollout.rollout_step import RolloutStep, TrainingStep
from pipeline.rollout.workers import Interrupted, OutOfTime, TrainingStopped, Workers
from pipeline.run.history import RESTARTED
from pipeline.run.ledger import Work
from pipeline.run.records import Records, finite
from pipeline.run.requests import Requests

MAX_SKIPPED_IN_A_ROW = 3
"""Number of consecutive skipped updates that ends the run."""

Decided = TypeVar("Decided", bound="Decision | None")


class Coordinator:
    """One process of a run, from the first probe to the summary.

    Args:
        config: of the run.
        data: prompts of the splits, and demonstrations if there is an SFT phase.
        maker: decodes completions.
        workers: sample, score and learn.
        records: where the run is recorded.
        meter: of its seconds and tokens.
        deadline: arithmetic of the budget, with earlier measurements.
        clock: the run's.
        progress: where to continue.
        resumed_from: step of the checkpoint that this process started from, if any.
    """

    def __init__(
        self,
        config: Config,
        *,
        data: LoadedData,
        maker: PromptMaker,
        workers: Workers,
        records: Records,
        meter: RunMeter,
        deadline: Deadline,
        clock: Clock,
        progress: Progress,
        resumed_from: int | None,
    ) -> None:
        self.data = data
        self.workers = workers
        self.records = records
        self.meter = meter
        self.phases = meter.ledger.phases
        self.clock = clock
        self.progress = progress
        self.resumed_from = resumed_from
        records.complete_reward_changes(progress.step)
        entries = list(records.folder.entries())
        self.requests = Requests(records.folder.path, entries, log=records)
        self.controller = RunController(
            config,
            deadline,
            entries=entries,
            step=progress.step,
            began_s=clock.elapsed_s,
            used_before_s=clock.used_before_s,
            test_prompts=len(data.test.prompts),
        )
        self.config = config = self.controller.config
        self.producer = RolloutProducer(
            config,
            data=data,
            maker=maker,
            workers=workers,
            log=records,
            has_time_for=lambda step: self.controller.has_time_for(step, self._now_s),
            now=clock.now,
        )
        self.schedule = EvaluationSchedule(
            config,
            data=data,
            maker=maker,
            workers=workers,
            records=records,
            now=clock.now,
            measure=self._measured,
        )
        self.exports = Exports(
            self.schedule, workers=workers, records=records, now=clock.now, measure=self._measured
        )
        self.profiler = Profiler(
            config.profile.range, workers=workers, ledger=meter.ledger, records=records
        )
        self.checkpoints = Checkpoints(
            workers=workers,
            records=records,
            ledger=meter.ledger,
            clock=clock,
            measure=self._measured,
        )
        changed = max(records.folder.reward_changes, default=0)
        rows = [row for row in records.folder.metrics if row["step"] > changed]
        alarms = records.folder.valid_entries("alarm")
        self.controller.alarms.replay(rows, self.schedule.validations, alarms)
        self._is_uncounted = False
        self._restarts = sum(entry["event"] == RESTARTED for entry in entries)

    async def run(self) -> Literal["finished", "interrupted"]:
        """Runs the training loop and all duties.

        Raises:
            ParityError: if sampler and learner are not the same policy.
            OutOfMemory: if no smaller sizes are left; a checkpoint is written first.
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
        self.records.truncation(self.config)
        partial = self.progress.sampling.partial
        self.meter.ledger.continue_partial(self.progress.step, partial.tokens)
        try:
            self.records.best(self.schedule.best)
            await self._account()  # of the start
            self._stop_by_alarms(self.progress.step, {})  # of a validation that is not repeated
            await self._perform_duties()
            while step := self._decide(self.controller.next(self._status, self._now_s)):
                try:
                    await self._train(step)
                except OutOfTime:
                    self._abandon()
                await self._perform_duties()
            await self._perform_duties()
        except Interrupted:
            await self.checkpoints.save_at_stop(self.progress, self.config)
            untaken = self.producer.untaken
            await self._account(Counter() if untaken is None else Counter(repeated=untaken.tokens))
            self._summarize(self.progress, ended="interrupted")
            return "interrupted"
        except (OutOfMemory, TrainingStopped):
            # A step that was trained and not counted would be trained twice after a resume.
            if not self._is_uncounted:
                await self._save()
            await self.checkpoints.settle()
            raise
        return "finished"

    async def _train(self, step: TrainStep) -> None:
        """Data -> update -> publish -> records."""
        await self.profiler.begin(step.number + 1)
        watch, during = Stopwatch(self.clock.now, phases=self.phases), self.phases.during
        data = await self.producer.take(step, self.progress.sampling, watch)
        metrics = data.metrics(self.config)
        if isinstance(data, RolloutStep):
            await self._check_rewards(data, step, metrics, watch)
        update = self._decide(self.controller.may_update(self._status, data.seconds, self._now_s))
        if update is None:
            await self._account(Counter(stale=data.tokens))
            raise OutOfTime
        with during("sample"):  # after the update the learner waits for rollouts sampled ahead
            async with self.producer.ahead(update.ahead, data.next_state):
                updating = Stopwatch(self.clock.now)
                with during("learn"):
                    learned = await self.workers.update(data, step, update.left)
                self._is_uncounted = True
                self.controller.observe_update(step, updating.total_s)
                watch.lap("learn")
        if self.config.rollout.ahead != "off" and step.phase == "grpo":
            watch.lap("wait")
        check_mean(learned, bound=self.config.parity_bounds.mean_stop)
        with during("sync"):
            await self.workers.publish()
        watch.lap("sync")
        self._measured(SYNC, watch.lap_s("sync"))
        tokens = data.token_fates(int(learned["tokens_trained"]))
        await self._account(tokens, data.work(learned, self.config))
        await self.profiler.end(step.number + 1)
        self._count(data, step, learned, metrics, watch)

    async def _perform_duties(self) -> None:
        """Start and end of the run, and what is due between two steps."""
        await self.checkpoints.settle(wait=False)
        step = self.progress.step
        duties: Mapping[DutyKind, Callable[[Duty], Awaitable[None]]] = {
            "check_parity": lambda _: self._check_parity(),
            "evaluate_before": lambda duty: self.schedule.evaluate_before(step, duty.deadline),
            "validate": self._validate,
            "recover_best": lambda _: self.schedule.recover_best(step, save=self._save),
            "repair_answers": lambda duty: self.schedule.repair_answers(step, duty.deadline),
            "export": lambda duty: self.exports.export(duty.adapter, reason=duty.reason),
            "checkpoint": lambda _: self._save(),
            "load_best": lambda _: self.schedule.load_best(step),
            "test": lambda duty: self.schedule.test(step, duty.deadline, share=duty.share),
            "refuse": self._refuse,
            "summarize": lambda _: self._finish(),
            "steer": self._steer,
            "export_copy": lambda _: self.exports.copy(step),
            "stop": self._stop,
        }
        while duty := self._decide(self.controller.due(self._status, self._now_s)):
            try:
                with self.phases.during(PHASES[duty.kind]):
                    await duties[duty.kind](duty)
            except OutOfTime:
                self._abandon()
            self.records.best(self.schedule.best)
            await self._account()

    # --- decisions

    def _decide(self, decision: Decided) -> Decided:
        """Journals a decision; the controller replays those of earlier processes."""
        if decision is not None:
            for entry in decision.journal:
                self._journal(entry)
        return decision

    def _abandon(self) -> None:
        self._journal(self.controller.abandoned(self._now_s))

    def _journal(self, entry: JournalEntry) -> None:
        if entry.text is None:
            self.records.journal(entry.event, **entry.facts)
        else:
            self.records.event(entry.event, entry.text, **entry.facts)

    @property
    def _now_s(self) -> float:
        return self.clock.elapsed_s

    @property
    def _status(self) -> RunStatus:
        best, exported = self.schedule.best, self.exports.current
        result, loaded = self.schedule.result, self.workers.published
        return RunStatus(
            self.progress.step,
            validated=self.schedule.validated,
            best=None if best is None else BestVersion(best["step"], best["adapter_sha256"]),
            exported=None
            if exported is None
            else Exported(
                exported["version"],
                exported["adapter_sha256"],
                self.schedule.is_evaluated(exported["adapter_sha256"]),
            ),
            loaded_sha256=None if loaded is None else loaded.sha256,
            tested=result is not None and result.tested,
            requests=self.requests.pending,
        )

    def _measured(self, part: str, seconds: float) -> None:
        """Reports the duration of a part of the shutdown; a resumed run reads it in the journal."""
        self.controller.observe(part, seconds)
        in_journal = part == EXPORT and self.controller.deadline.time_s is not None
        if in_journal or part not in {EXPORT, SYNC, CHECKPOINT}:
            self.records.journal("reserved", reason=part, seconds=seconds, elapsed_s=self._now_s)

    # --- duties

    async def _check_parity(self) -> None:
        bound = self.config.parity_bounds.probe
        largest = await self.workers.probe(self.data.train.prompts)
        self.records.event(
            "parity",
            f"parity: sampler and learner differ by {largest:.2g} of what a random adapter "
            f"changes, allowed {bound:g}",
            largest=largest,
            bound=bound,
        )
        watch = Stopwatch(self.clock.now)
        await self.workers.publish()
        self._measured(SYNC, watch.total_s)

    async def _validate(self, duty: Duty) -> None:
        await self.schedule.validate(self.progress.step, duty.deadline, save=self._save)
        self._stop_by_alarms(self.progress.step, {})

    async def _refuse(self, duty: Duty) -> None:
        assert duty.error is not None
        raise duty.error

    async def _steer(self, duty: Duty) -> None:
        """Acts on a request that the controller has put into force, or has refused."""
        request, step = duty.request, self.progress.step
        assert request is not None
        self.requests.taken(request)
        if self.config is self.controller.config:
            return
        self.config = self.producer.config = self.controller.config
        self.records.folder.write_config(self.config)
        self.schedule.adopt(self.config, step, request=request.id)

    async def _stop(self, _: Duty) -> None:
        raise Interrupted

    async def _finish(self) -> None:
        """Writes the summary of the whole run; rollouts that no step was trained on are dropped."""
        await self.checkpoints.settle()
        result, progress = self.schedule.result, self.progress
        assert result is not None
        untaken, partial = self.producer.untaken, progress.sampling.partial
        stale, lost = (0, 0) if untaken is None else (untaken.tokens, len(untaken.all_rollouts))
        waiting = partial.tokens
        await self._account(Counter(stale=stale, truncated=waiting, partial=-waiting))
        progress = replace(
            progress,
            tokens_generated=progress.tokens_generated + stale,
            dropped=progress.dropped + len(partial) + lost,
        )
        best = {} if result.best is None else {"best": result.best}
        untrained = self.exports.untrained(progress.step)
        self._summarize(progress, ended="finished", eval=result.compared, **best, **untrained)

    async def _save(self) -> None:
        await self.checkpoints.save(self.progress, self.config)

    # --- ledger

    async def _account(self, tokens: Counter[str] | None = None, work: Work | None = None) -> None:
        """Closes an interval of the ledger.

        Args:
            tokens: generated tokens by fate, without those of evaluations.
            work: of the training step that fills the interval, and is not counted yet; None: none.
        """
        tokens = Counter() if tokens is None else tokens
        tokens["evaluation"], self.workers.evaluation_tokens = self.workers.evaluation_tokens, 0
        step = self.progress.step + (work is not None)
        self.meter.account(step, await self.workers.uses(), tokens=tokens, work=work)

    # --- records of a step

    async def _check_rewards(
        self, data: RolloutStep, step: TrainStep, metrics: Mapping[str, float], watch: Stopwatch
    ) -> None:
        """Raises the alarms of a step's rewards; where one stops, the step is not counted.

        Raises:
            TrainingStopped: with the alarm, or the error that stops the run.
        """
        why = data.stop_reason(self.config, alarm=self._raise_alarms(step.number + 1, metrics))
        if why is None:
            return
        metrics = {**metrics, **self._time_metrics(step, watch)}
        data.record(self.records, metrics, tokens=self.config.records.tokens, trained=False)
        await self._account(Counter(repeated=data.tokens))  # by a resume
        raise TrainingStopped(why)

    def _raise_alarms(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Reports alarms of a step (without metrics: of its validation); returns why to stop."""
        alarms = self.controller.judge({"step": step, **metrics}, self.schedule.validations)
        for alarm in alarms:
            self._decide(alarm)
        return next((alarm.text for alarm in alarms if alarm.action == "stop"), None)

    def _stop_by_alarms(self, step: int, metrics: Mapping[str, float]) -> None:
        if why := self._raise_alarms(step, metrics):
            raise TrainingStopped(why)

    def _count(
        self,
        data: TrainingStep,
        step: TrainStep,
        learned: dict[str, float],
        sampled: Mapping[str, float],
        watch: Stopwatch,
    ) -> None:
        """Counts and records a step.

        Args:
            data: of the step.
            step: the decision to train it.
            learned: metrics of its update.
            sampled: metrics of its rollouts.
            watch: durations of its parts.

        Raises:
            TrainingStopped: after several skipped updates in a row, or because of an alarm.
        """
        if data.overflow and not learned["tokens_trained"]:
            learned = {**learned, "skipped_updates": 1.0}
        number, skipped = step.number + 1, "skipped_updates" in learned
        progress = data.counted(self.progress.after_update(learned))
        self.progress = replace(progress, step=number)
        self._is_uncounted = False
        updated = {f"{data.learner_prefix}/{name}": value for name, value in learned.items()}
        metrics = {
            **sampled,
            **updated,
            **self._time_metrics(step, watch),
            **self.meter.step_metrics(self.workers.sizes.in_force),
            **self.controller.outlook(self._now_s),
            "faults/reward_errors": float(progress.reward_errors),
            "faults/skipped_updates": float(progress.skipped_updates),
            "faults/restarts": float(self._restarts),
        }
        data.record(self.records, metrics, tokens=self.config.records.tokens, skipped=skipped)
        if skipped:
            loss, norm = learned.get("loss", 0.0), learned.get("grad_norm", 0.0)
            not_finite = f"its loss is {loss:g} and the norm of its gradient {norm:g}"
            self._skipped(number, data.overflow or not_finite, batch=data.name)
        elif data.overflow:
            self.records.event("overflow", f"step {number}: {data.overflow}", step=number)
        self._stop_by_alarms(number, finite(metrics))

    def _skipped(self, step: int, why: str, *, batch: str) -> None:
        """Records a skipped update; ends the run after several in a row.

        Raises:
            TrainingStopped: with the number of skipped updates.
        """
        self.records.skipped_update(step, why, batch=batch)
        in_a_row = self.progress.skipped_in_a_row
        if in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingStopped(
                f"step {step}: {in_a_row} updates in a row were skipped, this one because {why}; "
                "adapter and optimizer are those before them; look at the rewards and log-probs in "
                f"{self.records.folder.rollouts}"
            )

    def _time_metrics(self, step: TrainStep, watch: Stopwatch) -> dict[str, float]:
        found = watch.metrics() | {"time/elapsed_s": self._now_s}
        if self.controller.deadline.time_s is not None:
            found["rollout/prompts_planned"] = float(step.prompts)
        return found

    def _summarize(self, progress: Progress, *, ended: str, **more: Any) -> None:
        measured, deadline = self.meter.summary(), self.controller.deadline
        for line in ledger_lines(measured):
            self.records.say(line)
        summary = {
            "ended": ended,
            **progress.counts(dynamic=self.config.rollout.dynamic_sampling != "off"),
            "wall_s": self._now_s,
            "deadline_s": deadline.time_s,
            **({} if deadline.until_s is None else {"until_s": deadline.until_s}),
            **more,
            "adapter_sha256": self.workers.published.sha256 if self.workers.published else None,
            **measured,
            "resumed_from": self.resumed_from,
            **({} if self.config.run.fork is None else {"forked_from": self.config.run.fork}),
            "faults": {
                "reward_errors": progress.reward_errors,
                "skipped_updates": progress.skipped_updates,
                "restarts": self._restarts,
            },
        }
        self.records.folder.write_summary(summary, **self.meter.ledger.facts)
        self.records.tracker.summarize(summary)
