"""Records a training step, judges its alarms, and writes the summary of a run.

The data of a step, the metrics of its update and the use of the processes become a row of
`metrics.jsonl` and of W&B, a file in `rollouts/`, and alarms, which may stop the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.schema import Config
from pipeline.alarms import AlarmWatch
from pipeline.clock import Clock
from pipeline.deadline import Deadline
from pipeline.evaluate.schedule import EvaluationSchedule
from pipeline.plan.sizes import Sizes
from pipeline.progress import Progress
from pipeline.protocols import ProcessUse
from pipeline.rollout.rollout_step import RolloutStep, TrainingStep
from pipeline.rollout.workers import TrainingStopped, Workers
from pipeline.run.goodput import time_lines
from pipeline.run.history import RESTARTED, rewards_changed_after
from pipeline.run.meter import RunMeter, Work
from pipeline.run.records import Records, finite
from pipeline.types import TrainStep

MAX_SKIPPED_IN_A_ROW = 3
"""Number of consecutive skipped updates that ends the run."""


class StepRecorder:
    """Records the steps of one process of a run.

    Args:
        config: of the run.
        workers: of the run.
        records: of the run, those of earlier processes included.
        meter: makes the metrics of time and machine.
        deadline: of the run.
        clock: of the run.
        schedule: has the validations, on which alarms are judged.
        sizes: for which samplers and learner are compiled.
        resumed_from: step of the checkpoint that this process started from, if any.

    Attributes:
        checkpoint_requested: an alarm asks for a checkpoint.
    """

    def __init__(
        self,
        config: Config,
        *,
        workers: Workers,
        records: Records,
        meter: RunMeter,
        deadline: Deadline,
        clock: Clock,
        schedule: EvaluationSchedule,
        sizes: Sizes,
        resumed_from: int | None,
    ) -> None:
        self.checkpoint_requested = False
        self._config = config
        self._workers = workers
        self._records = records
        self._meter = meter
        self._deadline = deadline
        self._clock = clock
        self._schedule = schedule
        self._sizes = sizes
        self._resumed_from = resumed_from
        self._alarms = AlarmWatch(config)
        folder = records.folder
        changed = rewards_changed_after(folder.entries())
        rows = [row for row in folder.metrics if row["step"] > changed]
        self._alarms.replay(rows, schedule.validations, folder.valid_entries("alarm"))
        self._restarts = sum(True for _ in folder.events(RESTARTED))

    def check_rewards(
        self, data: RolloutStep, step: TrainStep, metrics: Mapping[str, float], *, step_s: float
    ) -> None:
        """Judges the alarms of a step's rewards before the update; a stopped step is recorded.

        Raises:
            TrainingStopped: with the alarm, or the error that stops the run.
        """
        why = data.stop_reason(self._config, alarm=self._raise_alarms(step.number + 1, metrics))
        if why is None:
            return
        metrics = {**metrics, **self._time_metrics(step, step_s)}
        tokens = self._config.records.tokens
        data.record(self._records, metrics, tokens=tokens, trained=False)
        raise TrainingStopped(why)

    def record(
        self,
        data: TrainingStep,
        step: TrainStep,
        *,
        sampled: Mapping[str, float],
        learned: Mapping[str, float],
        uses: Mapping[str, ProcessUse],
        progress: Progress,
        step_s: float,
    ) -> None:
        """Records a step that was trained.

        Args:
            data: of the step.
            step: that was trained.
            sampled: metrics of its rollouts.
            learned: metrics of its update.
            uses: of the workers in the step.
            progress: after the step.
            step_s: seconds of the step.

        Raises:
            TrainingStopped: after several skipped updates in a row, or because of an alarm.
        """
        number, skipped = progress.step, "skipped_updates" in learned
        sampled = {**sampled, **self._time_metrics(step, step_s)}
        updated = {f"{data.learner_prefix}/{name}": value for name, value in learned.items()}
        passes = self._config.learner.updates_per_batch if step.phase == "grpo" else 1
        metrics = {
            **sampled,
            **updated,
            **self._meter.step_metrics(
                {**sampled, **updated},
                uses,
                Work.of(data.decode_work, learned, passes=passes),
                progress=progress,
                sizes=self._sizes,
            ),
            **self._deadline.outlook(number, self._clock.elapsed_s),
            "faults/reward_errors": float(progress.reward_errors),
            "faults/skipped_updates": float(progress.skipped_updates),
            "faults/restarts": float(self._restarts),
        }
        data.record(self._records, metrics, tokens=self._config.records.tokens, skipped=skipped)
        if skipped:
            self._skipped(data, learned, progress)
        elif data.overflow:
            self._records.event("overflow", f"step {number}: {data.overflow}", step=number)
        self.stop_by_alarms(number, finite(metrics))

    def stop_by_alarms(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises the alarms of a step; without metrics those of its validation.

        Raises:
            TrainingStopped: if an alarm stops the run.
        """
        if why := self._raise_alarms(step, metrics):
            raise TrainingStopped(why)

    def _raise_alarms(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Reports alarms; returns why to stop."""
        alarms = self._alarms.judge({"step": step, **metrics}, self._schedule.validations)
        for alarm in alarms:
            self._records.event("alarm", alarm.text, **alarm.facts)
            self.checkpoint_requested |= alarm.action == "checkpoint"
        return next((alarm.text for alarm in alarms if alarm.action == "stop"), None)

    def _skipped(
        self, data: TrainingStep, learned: Mapping[str, float], progress: Progress
    ) -> None:
        """Records a skipped update.

        Raises:
            TrainingStopped: after several in a row.
        """
        loss, norm = learned.get("loss", 0.0), learned.get("grad_norm", 0.0)
        not_finite = f"its loss is {loss:g} and the norm of its gradient {norm:g}"
        why, in_a_row = data.overflow or not_finite, progress.skipped_in_a_row
        self._records.skipped_update(progress.step, why, batch=data.name)
        if in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingStopped(
                f"step {progress.step}: {in_a_row} updates in a row were skipped, this one because "
                f"{why}; adapter and optimizer are those before them; look at the rewards and "
                f"log-probs in {self._records.folder.rollouts}"
            )

    def _time_metrics(self, step: TrainStep, step_s: float) -> dict[str, float]:
        found = self._meter.driver_metrics()
        found |= {"time/step_s": step_s, "time/elapsed_s": self._clock.elapsed_s}
        if self._deadline.is_timed:
            found["rollout/prompts_planned"] = float(step.prompts)
        return found

    def summarize(self, progress: Progress, *, ended: str, **more: Any) -> None:
        """Writes `summary.json`; `ended` says how the run ended, `more` are further keys."""
        config, deadline, now_s = self._config, self._deadline, self._clock.elapsed_s
        use, seconds = self._meter.end(elapsed_s=now_s)
        cost = self._meter.cost(progress, used_s=now_s)
        for line in time_lines(use, cost=cost):
            self._records.say(line)
        published = self._workers.published
        summary = {
            "ended": ended,
            **progress.counts(dynamic=config.rollout.dynamic_sampling != "off"),
            "wall_s": now_s,
            "deadline_s": deadline.time_s,
            **({} if deadline.until_s is None else {"until_s": deadline.until_s}),
            **more,
            "adapter_sha256": published.sha256 if published else None,
            **use.to_json(),
            "cost": cost,
            "resumed_from": self._resumed_from,
            **({} if config.run.fork is None else {"forked_from": config.run.fork}),
            "faults": {
                "reward_errors": progress.reward_errors,
                "skipped_updates": progress.skipped_updates,
                "restarts": self._restarts,
            },
        }
        self._records.folder.write_summary(summary, seconds=seconds)
        self._records.tracker.summarize(summary)
