"""The synchronous loop: a warm start on worked examples, if asked for, then GRPO.

    prompts -> [samplers] -> completions -> [scorer] -> rollouts -> [learner] -> adapter v + 1
                   ^                                                                  |
                   +--------------------------- sync ---------------------------------+

    each step   produces   rollouts of version v, then version v + 1
                waits for  all completions, all rewards, the update, the sync; with a cut-off for
                           enough completions: what becomes of the others says waiting.py
    warm start  examples -> [learner] -> adapter v + 1, steps like the others
    between     validates now and then, keeps the best version (examiner.py)
    the end     tests and exports the best version, writes the summary; when, and in which order
                where there is a deadline, says timed.py

How rollouts are drawn says drawing.py, and that they may be drawn a step ahead says ahead.py.
Whether sampler and learner share a process is not known here. A signal sets `stop`: sampling and
scoring are abandoned, an update is finished, then a checkpoint is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from configs.schema import Config
from pipeline.contracts.clock import Stopwatch
from pipeline.contracts.memory import OutOfMemory
from pipeline.control.deadline import Deadline
from pipeline.control.timed import Timed
from pipeline.evaluate.evaluation import Evaluation
from pipeline.evaluate.schedule import EvaluationSchedule
from pipeline.inputs.dataset.packing import sequences_for_step
from pipeline.inputs.dataset.splits import LoadedData
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.inputs.text.tokenizer import Tokenizer
from pipeline.rollout.ahead import Supply
from pipeline.rollout.drawing import Drawer
from pipeline.rollout.dynamic_sampling import Estimates
from pipeline.rollout.partial import PartialRollouts
from pipeline.rollout.rollout_step import RolloutStep, Start
from pipeline.rollout.scoring import too_many_excluded
from pipeline.rollout.team import Interrupted, OutOfTime, Team, TrainingStopped, Workers
from pipeline.run.records import Records, example_rows

MAX_SKIPPED_IN_A_ROW = 3
"""So many skipped updates end the run: the next ones would hardly fare better."""


@dataclass(frozen=True)
class Progress:
    """Counters that a checkpoint carries.

    Attributes:
        step: steps learned from; the policy version.
        samples: rollouts drawn for training, to their end.
        tokens_generated: tokens of all that were drawn, those that were cut included.
        tokens_trained: tokens that were learned from.
        tokens_padded: positions that the learner computed and that held nothing.
        reward_errors: reward calls without a value.
        skipped_updates: updates that were skipped, because loss or gradient were not finite.
        skipped_in_a_row: those since the last one that was made.
        cut: how often a rollout was cut at a step's cut-off.
        continued: how often one was gone on with.
        dropped: rollouts that were cut and lost.
        waiting: rollouts that wait for a later step.
        prompts_drawn: prompts that groups were drawn for.
        unused: with dynamic sampling, rollouts that were drawn and not learned from.
        estimates: with dynamic sampling, what was measured so far.
        wall_s: time used when the checkpoint was written.
    """

    step: int = 0
    samples: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_padded: int = 0
    reward_errors: int = 0
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    cut: int = 0
    continued: int = 0
    dropped: int = 0
    waiting: PartialRollouts = field(default_factory=PartialRollouts)
    prompts_drawn: int = 0
    unused: int = 0
    estimates: Estimates = field(default_factory=Estimates)
    wall_s: float = 0.0

    def to_meta(self) -> dict[str, Any]:
        """As a checkpoint carries it: JSON."""
        waiting, estimates = self.waiting.to_json(), self.estimates.to_json()
        return {**vars(self), "waiting": waiting, "estimates": estimates}

    @staticmethod
    def of_meta(meta: Mapping[str, Any]) -> Progress:
        """What `to_meta` made."""
        known = {name: value for name, value in meta.items() if name != "journal_lines"}
        found = {**known, "waiting": PartialRollouts.of_json(meta["waiting"])}
        if "estimates" in meta:  # not in checkpoints from before there was dynamic sampling
            found["estimates"] = Estimates.of_json(meta["estimates"])
        return Progress(**found)

    def learned(self, metrics: Mapping[str, float]) -> Progress:
        """With the counters of an update that has these metrics; the step is not counted."""
        trained, skipped = int(metrics["tokens_trained"]), int(metrics.get("skipped_updates", 0))
        # Where tokens were learned from, an update was made before the one that was skipped.
        in_a_row = (0 if trained else self.skipped_in_a_row) + skipped
        return replace(
            self,
            tokens_trained=self.tokens_trained + trained,
            tokens_padded=self.tokens_padded + int(metrics["tokens_padded"]),
            skipped_updates=self.skipped_updates + skipped,
            skipped_in_a_row=in_a_row,
        )

    @property
    def start(self) -> Start:
        """What the next step is drawn by."""
        return Start(self.step, self.waiting, self.prompts_drawn, self.estimates)


class Coordinator:
    """One run from the first probe to the summary.

    Args:
        config: what to do.
        data: prompts of the splits, and worked examples if there is a warm start.
        tokenizer: for turning completions into text.
        workers: who does it.
        records: where it is written down.
        deadline: when to stop.
        progress: where to go on.
        resumed_from: step of the checkpoint this process started from, if any.
        stop: set from outside to end early.
    """

    def __init__(
        self,
        config: Config,
        *,
        data: LoadedData,
        tokenizer: Tokenizer,
        workers: Workers,
        records: Records,
        deadline: Deadline,
        progress: Progress,
        resumed_from: int | None,
        stop: asyncio.Event,
    ) -> None:
        self.config = config
        self.data = data
        self.team = Team(
            workers,
            config=config,
            stop=stop,
            patience_s=deadline.patience_s,
            ending_s=deadline.ending_s,
        )
        self.records = records
        self.deadline = deadline
        self.progress = progress
        self.resumed_from = resumed_from
        self.uncounted = False
        drawer = Drawer(
            config,
            data=data,
            maker=PromptMaker(config.prompt, tokenizer),
            team=self.team,
            folder=records.folder,
            prompts=lambda: self.timed.prompts,
            may_go_on=deadline.allows,
            now=deadline.clock.now,
        )
        self.supply = Supply(
            drawer,
            self.team,
            ahead=config.rollout.ahead != "off",
            first=config.sft_steps,
            will_be=deadline.allows,
        )
        self.examiner = EvaluationSchedule(
            config,
            data=data,
            tokenizer=tokenizer,
            team=self.team,
            records=records,
            deadline=deadline,
        )
        self.timed = Timed(
            config,
            examiner=self.examiner,
            team=self.team,
            records=records,
            deadline=deadline,
            step=progress.step,
        )

    async def run(self) -> Literal["finished", "interrupted"]:
        """The whole run.

        Raises:
            ParityError: if sampler and learner are not the same policy.
            OutOfMemory: if there is nothing smaller to go on with; a checkpoint is written first.
            TrainingStopped: if too many rewards are missing or too many updates were skipped;
                likewise.
            BudgetTooSmallError: if not one step fits into a budget of time.
        """
        try:
            self.records.truncation(self.config)
            await self._check_parity()
            # Validated, too: a signal may have come between a step and its validation.
            before = await self.timed.rehearse(self.progress.step, self._validate, self._save)
            try:
                while self.timed.allows(self.progress.step):
                    await self._turn()
                    await self.timed.last_look(self.progress.step, self._validate)
            except OutOfTime:
                self.timed.abandoned("what was being done", self.progress.step)
            await self._save()
            await self._finish(before)
        except Interrupted:
            await self._save()
            self._summarize(ended="interrupted")
            return "interrupted"
        except (OutOfMemory, TrainingStopped):
            # A step that was learned and not counted would be learned twice after a resume.
            if not self.uncounted:
                await self._save()
            raise
        return "finished"

    async def _turn(self) -> None:
        """A step and what is due after it."""
        self.team.raise_if_stopped()
        with self.timed.step(self.progress.step):
            warming_up = self.progress.step < self.config.sft_steps
            await (self._imitate() if warming_up else self._step())
        with self.timed.between():
            await self._validate()
            await self.timed.follow(self.progress.step)
            if self.progress.step % self.config.checkpoint.every_steps == 0:
                await self._save()

    async def _imitate(self) -> None:
        """Worked examples -> update -> publish."""
        config, step, watch = self.config, self.progress.step, self._stopwatch()
        assert self.data.sft is not None
        sequences = sequences_for_step(
            self.data.sft.demonstrations,
            seed=config.run.seed,
            step=step,
            sequences=config.sft.sequences_per_step,
            length=config.row_tokens,
        )
        learned = await self.team.learner.sft_update(sequences)
        self.uncounted = True
        watch.lap("learn")
        await self.team.publish()
        watch.lap("sync")
        self.timed.synced(watch.lap_s("sync"))
        self.progress = replace(self.progress.learned(learned), step=step + 1)
        self.uncounted = False
        metrics = {f"sft/{name}": value for name, value in learned.items()}
        self.records.imitation(step + 1, metrics | watch.metrics() | self.timed.metrics)
        if "skipped_updates" in learned:
            batch = f"sft_{step + 1:06d}"
            self.records.folder.write_rollouts(batch, example_rows(sequences))
            self._skipped(step + 1, _not_finite(learned), batch=batch)

    async def _step(self) -> None:
        """Prompts -> rollouts -> scores -> update -> publish."""
        config, step, watch = self.config, self.progress.step, self._stopwatch()
        drawn = await self.supply.take(self.progress.start, watch)
        self._check_rewards(drawn, watch)
        async with self.supply.beside(drawn.following):
            with self.timed.update(drawn.seconds):
                learned = await self.team.learner.update(drawn.rollouts, rate=self.timed.rate)
            self.uncounted = True
            watch.lap("learn")
        if drawn.overflow and not learned["tokens_trained"]:
            learned = {**learned, "skipped_updates": 1.0}
        if config.rollout.ahead != "off":
            watch.lap("wait")
        self._watch_parity(learned)
        await self.team.publish()
        watch.lap("sync")
        self.timed.synced(watch.lap_s("sync"))
        errors, settled, all_rollouts = drawn.errors, drawn.settled, drawn.all_rollouts
        self.progress = replace(
            self.progress.learned(learned),
            step=step + 1,
            samples=self.progress.samples + len(all_rollouts),
            tokens_generated=self.progress.tokens_generated + drawn.tokens,
            reward_errors=self.progress.reward_errors + sum(map(len, errors.values())),
            cut=self.progress.cut + settled.cut,
            continued=self.progress.continued + settled.continued,
            dropped=self.progress.dropped + settled.dropped,
            waiting=settled.waiting,
            prompts_drawn=drawn.following.prompts_drawn,
            unused=self.progress.unused + len(all_rollouts) - len(drawn.rollouts),
            estimates=drawn.learned(watch),
        )
        self.uncounted = False
        metrics = drawn.metrics(config) | {
            f"learner/{name}": value for name, value in learned.items()
        }
        self.records.reward_errors(step + 1, errors)
        skipped = "skipped_updates" in learned
        self.records.step(
            step + 1,
            metrics | watch.metrics() | self.timed.metrics,
            drawn.rollouts,
            tokens=config.records.tokens or skipped,
        )
        overflow = f"rewards are so large that the advantages of {drawn.overflow} groups overflow"
        if skipped:
            why = overflow if drawn.overflow else _not_finite(learned)
            self._skipped(step + 1, why, batch=f"step_{step + 1:06d}")
        elif drawn.overflow:
            self.records.event("overflow", f"step {step + 1}: {overflow}", step=step + 1)

    def _check_rewards(self, drawn: RolloutStep, watch: Stopwatch) -> None:
        """Ends the run before too few rewards are learned from; the step is recorded, not counted.

        Raises:
            TrainingStopped: saying what failed.
        """
        config, step = self.config, self.progress.step + 1
        why = too_many_excluded(drawn.all_rollouts, drawn.errors, config.rewards)
        if why is None:
            return
        self.records.reward_errors(step, drawn.errors)
        self.records.step(
            step,
            drawn.metrics(config) | watch.metrics() | self.timed.metrics,
            drawn.all_rollouts,
            tokens=config.records.tokens,
        )
        raise TrainingStopped(f"step {step}: {why}")

    def _skipped(self, step: int, why: str, *, batch: str) -> None:
        """Says that an update was skipped, and ends the run after several in a row.

        Raises:
            TrainingStopped: naming the version that the policy still is.
        """
        self.records.skipped_update(step, why, batch=batch)
        in_a_row = self.progress.skipped_in_a_row
        if in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingStopped(
                f"step {step}: {in_a_row} updates in a row were skipped, this one because {why}; "
                "adapter and optimizer are those before them; look at the rewards and log-probs in "
                f"{self.records.folder.rollouts}"
            )

    async def _validate(self, *, last: bool = False) -> None:
        if self.examiner.is_due(self.progress.step, last=last):
            await self.examiner.validate(self.progress.step, save=self._save)

    async def _check_parity(self) -> None:
        largest = await self.team.probe(self.data.train.prompts)
        bound = self.team.bounds.probe
        self.records.event(
            "parity",
            f"parity: sampler and learner agree to {largest:.1e} under a random adapter",
            largest=largest,
            bound=bound,
        )
        watch = self._stopwatch()
        await self.team.publish()
        self.timed.synced(watch.total_s)

    def _watch_parity(self, learned: dict[str, float]) -> None:
        alarm = self.team.bounds.alarm(learned)
        if alarm:
            self.records.event("parity_alarm", f"parity alarm: {alarm}", step=self.progress.step)

    async def _finish(self, before: dict[str, Evaluation]) -> None:
        """Tests the policy that is exported, exports it, sums up."""
        result = await self.timed.end(self.progress.step, before, self._validate)
        best = {} if result.best is None else {"best": result.best}
        self._summarize(ended="finished", eval=result.compared, **best)

    async def _save(self) -> None:
        watch, step = self._stopwatch(), self.progress.step
        self.progress = replace(self.progress, wall_s=self.deadline.clock.elapsed_s)
        meta = {**self.progress.to_meta(), "journal_lines": self.records.folder.sync()}
        await self.team.learner.save(meta)
        seconds = watch.total_s
        self.timed.saved(step, seconds)
        self.records.folder.journal(
            "checkpoint", step=step, wall_s=self.progress.wall_s, seconds=seconds
        )

    def _summarize(self, *, ended: str, **more: Any) -> None:
        progress, left = self.progress, self.supply.left if ended == "finished" else None
        lost = len(progress.waiting) if ended == "finished" else 0
        if left is not None:
            lost += len(left.all_rollouts)
        dynamic = self.config.rollout.dynamic_sampling != "off"
        unused = {"unused": progress.unused} if dynamic else {}
        summary = {
            "ended": ended,
            "steps": progress.step,
            "samples": progress.samples,
            "tokens_generated": progress.tokens_generated + (left.tokens if left else 0),
            "tokens_trained": progress.tokens_trained,
            "tokens_padded": progress.tokens_padded,
            "rollouts": {
                "cut": progress.cut,
                "continued": progress.continued,
                "dropped": progress.dropped + lost,
                **unused,
            },
            "wall_s": self.deadline.clock.elapsed_s,
            "deadline_s": self.deadline.time_s,
            **({} if self.deadline.until_s is None else {"until_s": self.deadline.until_s}),
            **more,
            "adapter_sha256": self.team.published.sha256 if self.team.published else None,
            "resumed_from": self.resumed_from,
            "faults": {
                "reward_errors": progress.reward_errors,
                "skipped_updates": progress.skipped_updates,
            },
        }
        self.records.folder.write_summary(summary)
        self.records.tracker.summarize(summary)

    def _stopwatch(self) -> Stopwatch:
        return Stopwatch(self.deadline.clock.now)


def _not_finite(learned: Mapping[str, float]) -> str:
    """Why an update with these metrics was skipped."""
    loss, norm = learned["loss"], learned["grad_norm"]
    return f"its loss is {loss:g} and the norm of its gradient {norm:g}"
