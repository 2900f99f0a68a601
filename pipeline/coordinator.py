"""The synchronous GRPO loop.

    prompts -> [samplers] -> completions -> [scorer] -> rollouts -> [learner] -> adapter v + 1
                   ^                                                                  |
                   +--------------------------- sync ---------------------------------+

    each step   produces   rollouts of version v, then version v + 1
                waits for  all completions, all rewards, the update, the sync
    the end     evaluates, exports, writes the summary

Whether sampler and learner share a process is not known here. A signal sets `stop`: sampling and
scoring are abandoned, an update is finished, then a checkpoint is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from configs.schema import Config
from pipeline import dispatch, evaluation, parity
from pipeline.datatypes import Completion, Phase, Prompt, Published, RolloutName, RolloutRequest
from pipeline.deadline import Deadline
from pipeline.evaluation import Evaluation
from pipeline.interfaces import Learner, Sampler, Scorer
from pipeline.order import prompts_for_step
from pipeline.records import Records, step_metrics
from pipeline.scoring import reward_errors, reward_inputs, score_rollouts
from pipeline.splits import LoadedData
from pipeline.tokenizer import Tokenizer
from rewards.base import Tags

T = TypeVar("T")

ABORT_PATIENCE_S = 30.0
"""How long a sampler may take to notice that it was told to stop."""


class Interrupted(Exception):  # noqa: N818  # not an error: the user asked for it
    """A signal arrived; what was in flight is abandoned."""


@dataclass(frozen=True)
class Progress:
    """Counters that a checkpoint carries.

    Attributes:
        step: steps learned from; the policy version.
        samples: rollouts drawn for training.
        tokens_generated: their tokens.
        tokens_trained: tokens that were learned from.
        reward_errors: reward calls without a value.
        wall_s: time used when the checkpoint was written.
    """

    step: int = 0
    samples: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    reward_errors: int = 0
    wall_s: float = 0.0


@dataclass
class Workers:
    """Whom the coordinator commands."""

    samplers: Sequence[Sampler]
    learner: Learner
    scorer: Scorer


class Coordinator:
    """One run from the first probe to the summary.

    Args:
        config: what to do.
        data: prompts of the splits.
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
        self.tokenizer = tokenizer
        self.workers = workers
        self.records = records
        self.deadline = deadline
        self.progress = progress
        self.resumed_from = resumed_from
        self.stop = stop
        self.tags = Tags.of(config.prompt)
        self.bounds = parity.Bounds.of(config)
        self.published: Published | None = None

    async def run(self) -> Literal["finished", "interrupted"]:
        """The whole run.

        Raises:
            ParityError: if sampler and learner are not the same policy.
        """
        try:
            await self._check_parity()
            before = await self._evaluate_before()
            await self._validate()  # a signal may have come between a step and its validation
            while self.deadline.allows(self.progress.step):
                watch = self._stopwatch()
                await self._step()
                await self._validate()
                if self.progress.step % self.config.checkpoint.every_steps == 0:
                    await self._save()
                self.deadline.observe_step(watch.total_s)
            await self._save()
            await self._finish(before)
        except Interrupted:
            await self._save()
            self._summarize(ended="interrupted")
            return "interrupted"
        return "finished"

    async def _step(self) -> None:
        """Prompts -> rollouts -> scores -> update -> publish."""
        config, step, watch = self.config, self.progress.step, self._stopwatch()
        prompts = prompts_for_step(
            self.data.train.prompts,
            seed=config.run.seed,
            step=step,
            prompts_per_step=config.rollout.prompts_per_step,
        )
        completions = await self._sample(prompts, step)
        watch.lap("sample")
        inputs = reward_inputs(
            completions, {p.id: p for p in prompts}, tokenizer=self.tokenizer, tags=self.tags
        )
        outcomes = await self._unless_stopped(self.workers.scorer.score(inputs))
        errors = reward_errors(outcomes)
        rollouts, stats = score_rollouts(completions, inputs, outcomes, config=config, step=step)
        watch.lap("reward")
        learned = await self.workers.learner.update(rollouts)
        watch.lap("learn")
        self._watch_parity(learned)
        await self._publish()
        watch.lap("sync")
        self.progress = replace(
            self.progress,
            step=step + 1,
            samples=self.progress.samples + len(rollouts),
            tokens_generated=self.progress.tokens_generated
            + sum(len(completion.tokens) for completion in completions),
            tokens_trained=self.progress.tokens_trained + int(learned["tokens_trained"]),
            reward_errors=self.progress.reward_errors + sum(map(len, errors.values())),
        )
        metrics = step_metrics(rollouts, stats) | {
            f"learner/{name}": value for name, value in learned.items()
        }
        self.records.reward_errors(step + 1, errors)
        self.records.step(
            step + 1, metrics | watch.metrics(), rollouts, tokens=config.records.tokens
        )

    async def _validate(self) -> None:
        """The validation split every `eval.every_steps` steps, once each, whatever interrupts."""
        step, every, folder = self.progress.step, self.config.eval.every_steps, self.records.folder
        name = f"validation_{step:06d}"
        if not every or not step or step % every or folder.read_rollouts(name) is not None:
            return
        assert self.data.validation is not None
        watched, _ = await self._evaluate("validation", self.data.validation.prompts)
        self.records.evaluation("validation", step, watched.summary())
        folder.write_rollouts(name, watched.rows)

    async def _check_parity(self) -> None:
        largest = await self._unless_stopped(
            parity.check_probe(
                self.workers.samplers,
                self.workers.learner,
                self.data.train.prompts,
                bound=self.bounds.probe,
                temperature=self.config.rollout.temperature,
            ),
            aborts=self.workers.samplers,
        )
        self.records.event(
            "parity",
            f"parity: sampler and learner agree to {largest:.1e} under a random adapter",
            largest=largest,
            bound=self.bounds.probe,
        )
        await self._publish()

    async def _publish(self) -> None:
        """Brings the learner's adapter to the samplers."""
        self.published = await self.workers.learner.publish()
        await parity.sync(self.workers.samplers, self.published)

    async def _sample(self, prompts: Sequence[Prompt], step: int) -> list[Completion]:
        size = self.config.rollout.group_size
        requests = [
            RolloutRequest(RolloutName("train", step, prompt.id, sample), prompt.tokens)
            for prompt in prompts
            for sample in range(size)
        ]
        return await self._generate(requests, temperature=self.config.rollout.temperature)

    async def _generate(
        self, requests: Sequence[RolloutRequest], *, temperature: float
    ) -> list[Completion]:
        completions = await self._unless_stopped(
            dispatch.generate(
                self.workers.samplers,
                requests,
                rows=self.config.plan.rollout_rows,
                temperature=temperature,
            ),
            aborts=self.workers.samplers,
        )
        assert self.published is not None
        parity.check_labels(completions, self.published)
        return completions

    def _watch_parity(self, learned: dict[str, float]) -> None:
        alarm = self.bounds.alarm(learned)
        if alarm:
            self.records.event("parity_alarm", f"parity alarm: {alarm}", step=self.progress.step)

    async def _evaluate(
        self, phase: Phase, prompts: Sequence[Prompt]
    ) -> tuple[Evaluation, list[Completion]]:
        completions = await self._generate(
            evaluation.requests(prompts, phase=phase), temperature=self.config.eval.temperature
        )
        judged = evaluation.judge(prompts, completions, tokenizer=self.tokenizer, tags=self.tags)
        return judged, completions

    async def _evaluate_before(self) -> Evaluation:
        """The untrained policy on the test split; read from the run folder if it is there.

        Raises:
            RuntimeError: if it is not there and the policy is no longer untrained.
        """
        folder = self.records.folder
        rows = folder.read_rollouts("test_before")
        if rows is not None:
            before = Evaluation.of(rows)
        elif self.progress.step:
            raise RuntimeError(
                f"{folder.rollouts / 'test_before.jsonl'} is gone, and what the policy answered "
                f"before its {self.progress.step} steps cannot be measured any more"
            )
        else:
            watch = self._stopwatch()
            before, _ = await self._evaluate("test", self.data.test.prompts)
            folder.journal("reserved", reason="test evaluation", seconds=watch.total_s)
            self.records.evaluation("test_before", 0, before.summary())
            folder.write_rollouts("test_before", before.rows)  # last: it says that all is recorded
        seconds = [entry["seconds"] for entry in folder.events("reserved")]
        self.deadline.reserve_s += max(seconds, default=0.0)
        return before

    async def _finish(self, before: Evaluation) -> None:
        """Evaluates the tuned policy, exports it, sums up."""
        after, completions = await self._evaluate("test", self.data.test.prompts)
        self.records.folder.write_rollouts("test_after", after.rows)
        self.records.evaluation("test_after", self.progress.step, after.summary())
        report = await self.workers.learner.export(
            str(self.records.folder.export), completions[: self.config.plan.micro_batch_rows]
        )
        self.records.event(
            "exported",
            f"export: {report.folder}, log-probs equal to {report.max_difference:.1e}",
            **asdict(report),
        )
        compared = evaluation.compare(before, after)
        self.records.comparison(compared)
        self._summarize(ended="finished", eval=compared)

    async def _save(self) -> None:
        self.progress = replace(self.progress, wall_s=self.deadline.clock.elapsed_s)
        await self.workers.learner.save(asdict(self.progress))
        self.records.folder.journal(
            "checkpoint", step=self.progress.step, wall_s=self.progress.wall_s
        )

    def _summarize(self, *, ended: str, **more: Any) -> None:
        progress = self.progress
        summary = {
            "ended": ended,
            "steps": progress.step,
            "samples": progress.samples,
            "tokens_generated": progress.tokens_generated,
            "tokens_trained": progress.tokens_trained,
            "wall_s": self.deadline.clock.elapsed_s,
            "deadline_s": self.deadline.time_s,
            **more,
            "adapter_sha256": self.published.sha256 if self.published else None,
            "resumed_from": self.resumed_from,
            "faults": {"reward_errors": progress.reward_errors},
        }
        self.records.folder.write_summary(summary)
        self.records.tracker.summarize(summary)

    async def _unless_stopped(
        self, work: Coroutine[Any, Any, T], *, aborts: Sequence[Sampler] = ()
    ) -> T:
        """The result of `work`, abandoned if `stop` is set first.

        Args:
            work: what to do; not begun if `stop` is set already.
            aborts: samplers that are told, and get a while to end what they do.

        Raises:
            Interrupted: if it was abandoned.
        """
        if self.stop.is_set():
            work.close()
            raise Interrupted
        task, stopped = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            return task.result()
        # What goes wrong while ending is of no interest: a sampler that is gone has ended.
        ending = asyncio.gather(
            task, *(sampler.abort() for sampler in aborts), return_exceptions=True
        )
        with suppress(TimeoutError):
            await asyncio.wait_for(ending, ABORT_PATIENCE_S if aborts else 0)
        raise Interrupted

    def _stopwatch(self) -> Stopwatch:
        return Stopwatch(self.deadline.clock.now)


class Stopwatch:
    """Seconds by part of a step.

    Args:
        now: reads the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._started = self._last = now()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Ends the part that began at the last lap."""
        now = self._now()
        self._laps[name] = now - self._last
        self._last = now

    @property
    def total_s(self) -> float:
        """Seconds so far."""
        return self._now() - self._started

    def metrics(self) -> dict[str, float]:
        """`time/PART_s` and, from the start to the last lap, `time/step_s`."""
        laps = {f"time/{name}_s": seconds for name, seconds in self._laps.items()}
        return {**laps, "time/step_s": self._last - self._started}
