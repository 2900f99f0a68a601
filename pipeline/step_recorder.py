"""Records a training step, judges its alarms, and writes the summary of a run.

The data of a step, the metrics of its update and the use of the processes become a row of
`metrics.jsonl` and of W&B, a file in `rollouts/`, and alarms, which may stop the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.alarms import step_alarms
from pipeline.evaluate.schedule import EvaluationSchedule
from pipeline.progress import Progress
from pipeline.protocols import ProcessUse
from pipeline.rollout.rollout_step import RolloutStep, TrainingStep
from pipeline.rollout.scoring import stopping_error
from pipeline.rollout.workers import TrainingStopped
from pipeline.run.goodput import step_seconds, time_lines
from pipeline.run.history import RESTARTED, REWARDS_CHANGED
from pipeline.run.records import finite
from pipeline.run.rollout_records import demonstration_rows, rollout_records
from pipeline.run_context import RunContext

MAX_SKIPPED_IN_A_ROW = 3
"""Number of consecutive skipped updates that ends the run."""


class StepRecorder:
    """Records the steps of one process of a run."""

    def __init__(self, run: RunContext, schedule: EvaluationSchedule) -> None:
        self._run = run
        self._schedule = schedule
        folder = run.folder
        changes = [entry["after_step"] for entry in folder.events(REWARDS_CHANGED)]
        self._rows = [row for row in folder.metrics if row["step"] > max(changes, default=0)]
        journaled = folder.valid_entries("alarm")
        self._alarmed = {(entry["rule"], entry["part"], entry["step"]) for entry in journaled}
        self._restarts = sum(True for _ in folder.events(RESTARTED))

    def check_rewards(self, data: RolloutStep, metrics: Mapping[str, float]) -> None:
        """Judges the alarms of a step's rewards before the update; a stopped step is recorded.

        Raises:
            TrainingStopped: with the alarm, or the error that stops the run.
        """
        alarm = self._raise_alarms([*self._rows, {"step": data.number + 1, **metrics}])
        error = stopping_error(data.all_rollouts, self._run.config.rewards)
        why = alarm if error is None else f"step {data.number + 1}: {error}"
        if why is None:
            return
        metrics = {**metrics, **self._time_metrics()}
        self._write(data, metrics, trained=False)
        raise TrainingStopped(why)

    def record(
        self,
        data: TrainingStep,
        *,
        sampled: Mapping[str, float],
        learned: Mapping[str, float],
        uses: Mapping[str, ProcessUse],
        progress: Progress,
    ) -> None:
        """Records a trained step: metrics of its rollouts and its update, progress after it.

        Raises:
            TrainingStopped: after several skipped updates in a row, or because of an alarm.
        """
        run, number, skipped = self._run, progress.step, "skipped_updates" in learned
        metrics = {
            **sampled,
            **self._time_metrics(),
            **{f"{data.learner_prefix}/{name}": value for name, value in learned.items()},
        }
        run.deadline.observe({"step": number, **metrics})
        metrics |= {
            **run.meter.step_metrics(
                metrics,
                uses,
                passes=run.config.learner.updates_per_batch if isinstance(data, RolloutStep) else 1,
                progress=progress,
                sizes=run.sizes,
            ),
            **run.deadline.outlook(number, run.now_s),
            "faults/reward_errors": float(progress.reward_errors),
            "faults/skipped_updates": float(progress.skipped_updates),
            "faults/restarts": float(self._restarts),
        }
        self._write(data, metrics, skipped=skipped)
        if skipped:
            self._skipped(data, learned, progress)
        self._rows.append({"step": number, **finite(metrics)})
        why = self._raise_alarms(self._rows)
        if why is not None:
            raise TrainingStopped(why)

    def judge_last_validation(self) -> None:
        """Raises the alarms of a validation of the last version, which stop nothing any more."""
        if self._rows and self._rows[-1]["step"] in self._schedule.validated:
            self._raise_alarms(self._rows, ended=True)

    def _write(
        self,
        data: TrainingStep,
        metrics: Mapping[str, float],
        *,
        skipped: bool = False,
        trained: bool = True,
    ) -> None:
        """Writes a step's rollouts, or the demonstrations of a skipped update; then the metrics.

        Of a step that is not trained, all rollouts are written; of a skipped update, token ids and
        log-probs in any case.
        """
        records, folder, number = self._run.records, self._run.folder, data.number + 1
        if isinstance(data, RolloutStep):
            records.reward_errors(number, data.errors)
            rollouts = data.rollouts if trained else data.all_rollouts
            tokens = self._run.config.records.tokens or skipped
            folder.write_rollouts(data.name, rollout_records(rollouts, tokens=tokens))
            records.step(number, metrics, rollouts=data.name, trained=trained)
            return
        records.step(number, metrics)
        if skipped:
            folder.write_rollouts(data.name, demonstration_rows(data.sequences))

    def _raise_alarms(
        self, rows: Sequence[Mapping[str, float]], *, ended: bool = False
    ) -> str | None:
        """Reports alarms of the last row that were not reported before; returns why to stop.

        For `ended` see `step_alarms`.
        """
        alarms = step_alarms(self._run.config, rows, self._schedule.validations, ended=ended)
        new = [one for one in alarms if (one.rule, one.part, one.step) not in self._alarmed]
        for alarm in new:
            self._alarmed.add((alarm.rule, alarm.part, alarm.step))
            self._run.records.alarm(alarm)
        return next((alarm.text for alarm in new if alarm.action == "stop"), None)

    def _skipped(
        self, data: TrainingStep, learned: Mapping[str, float], progress: Progress
    ) -> None:
        """Records a skipped update.

        Raises:
            TrainingStopped: after several in a row.
        """
        loss, norm = learned.get("loss", 0.0), learned.get("grad_norm", 0.0)
        why = f"its loss is {loss:g} and the norm of its gradient {norm:g}"
        in_a_row = progress.skipped_in_a_row
        self._run.records.skipped_update(progress.step, why, batch=data.name)
        if in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingStopped(
                f"step {progress.step}: {in_a_row} updates in a row were skipped, this one because "
                f"{why}; adapter and optimizer are those before them; look at the rewards and "
                f"log-probs in {self._run.folder.rollouts}"
            )

    def _time_metrics(self) -> dict[str, float]:
        found = self._run.meter.driver_metrics()
        return found | {"time/step_s": step_seconds(found), "time/elapsed_s": self._run.now_s}

    def summarize(self, progress: Progress, *, ended: str, **more: Any) -> None:
        """Writes `summary.json`; `ended` says how the run ended, `more` are further keys."""
        run, now_s = self._run, self._run.now_s
        use, seconds = run.meter.end(elapsed_s=now_s)
        cost = run.meter.cost(progress, used_s=now_s)
        for line in time_lines(use, cost=cost):
            run.records.say(line)
        published, until_s = run.workers.published, run.deadline.until_s
        summary = {
            "ended": ended,
            **progress.counts(),
            "wall_s": now_s,
            "deadline_s": run.deadline.time_s,
            **({} if until_s is None else {"until_s": until_s}),
            **more,
            "adapter_sha256": published.sha256 if published else None,
            **use.to_json(),
            "cost": cost,
            "resumed_from": run.resumed_from,
            **({} if run.config.run.fork is None else {"forked_from": run.config.run.fork}),
            "faults": {
                "reward_errors": progress.reward_errors,
                "skipped_updates": progress.skipped_updates,
                "restarts": self._restarts,
            },
        }
        run.folder.write_summary(summary, elapsed_s=now_s, seconds=seconds)
        run.records.tracker.summarize(summary)
