"""Produces the data of each training step: sampled, scored rollouts, or demonstrations.

    prompts -> [samplers] -> completions -> [reward workers] -> rewards -> rollouts -.
       ^                                                                             |
       +-- a further round, while groups are without signal (dynamic_sampling.py) ---+

    rollout.ahead = "off"     sample k -> update k -> sync k+1 -> sample k+1 -> ...

    rollout.ahead = "one"     sync k -.-> update k: version k+1 -------.-> sync k+1 -.-> ...
                                      '-> sample k+1 under version k --'             '-> ...

    samplers   produce       rollouts of step k+1 under version k, rewards included
               wait for      the rollouts of step k, and version k
               unblocked by  the start of step k
    learner    produces      version k+1
               waits for     the rollouts of step k, which version k-1 sampled
               unblocked by  the start of step k
    sync       waits for     both: no work runs between two steps

With `rollout.ahead` every step's rollouts are one version behind, except those of the first GRPO
step. No checkpoint contains rollouts sampled ahead: a resumed run samples them again under the
previous version and is the same run. A signal abandons the sampling and lets the update finish.

A round's prompts are a function of what was sampled before, and with a time budget of the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import groupby

from pipeline.clock import PhaseClock
from pipeline.data.order import consecutive_prompts, evenly_spaced, prompts_for_step
from pipeline.data.packing import sequences_for_step
from pipeline.progress import SamplingState
from pipeline.rollout import dynamic_sampling
from pipeline.rollout.dispatch import counting
from pipeline.rollout.partial import continuations, split_partial
from pipeline.rollout.rollout_step import (
    DemonstrationStep,
    RolloutStep,
    SamplingRound,
    TrainingStep,
)
from pipeline.rollout.scoring import EarlyScoring, reward_inputs, score_rollouts
from pipeline.rollout.workers import Interrupted, OutOfTime
from pipeline.run_context import RunContext
from pipeline.types import Completion, Prompt, RolloutName, RolloutRequest, TrainStep
from rewards.base import RewardInput, Tags


class RolloutProducer:
    """Produces the data of one training step after the other."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._prompts = {prompt.id: prompt for prompt in run.data.train.prompts}
        self._tags = Tags.of_run(run.config)
        self._ahead: asyncio.Task[RolloutStep] | None = None

    async def take(self, step: TrainStep, state: SamplingState) -> TrainingStep:
        """The data of a step, with the newest version loaded into the samplers.

        `state` is that of the sampling before the step.

        Raises:
            Interrupted: if the run is stopped.
            OutOfTime: at the deadline of the step.
        """
        config, workers, phases = self._run.config, self._run.workers, self._run.phases
        workers.raise_if_stopped()
        if step.phase == "sft":
            return self._demonstrations(step, state)
        if self._ahead is not None:
            found, self._ahead = self._ahead.result(), None
            assert found.number == step.number
            return found
        if config.rollout.ahead == "off" or step.number == config.sft_steps:
            return await self._sample(step, state, phases)
        # A resumed run: the rollouts that the killed process sampled ahead.
        await workers.publish("previous")
        try:
            return await self._sample(step, state, phases)
        finally:
            await workers.publish()

    @asynccontextmanager
    async def ahead(self, step: TrainStep | None, state: SamplingState) -> AsyncIterator[None]:
        """Samples a step ahead while the body runs; returns when both have ended.

        If the stop signal or the deadline ends the sampling, `take` raises the error.
        """
        if step is None:
            yield
            return
        sampling = asyncio.create_task(self._sample(step, state, PhaseClock(self._run.clock.now)))
        try:
            yield
        except BaseException:
            sampling.cancel()
            await asyncio.wait({sampling})
            raise
        await asyncio.wait({sampling})
        error = sampling.exception()
        if error is not None and not isinstance(error, Interrupted | OutOfTime):
            raise error
        self._ahead = sampling

    def _demonstrations(self, step: TrainStep, state: SamplingState) -> DemonstrationStep:
        config = self._run.config
        assert self._run.data.sft is not None
        sequences = sequences_for_step(
            self._run.data.sft.demonstrations,
            seed=config.run.seed,
            step=step.number,
            sequences=config.sft.sequences_per_step,
            length=config.row_tokens,
        )
        return DemonstrationStep(step.number, sequences, state)

    async def _sample(
        self, step: TrainStep, state: SamplingState, phases: PhaseClock
    ) -> RolloutStep:
        """The rollouts of a step under the loaded adapter."""
        settings = self._run.config.rollout
        if settings.dynamic_sampling == "off":
            only = await self._round(self._prompts_of(step), step, state, phases)
            return RolloutStep(step.number, state, (only,), only.rollouts)
        rounds, groups = list[SamplingRound](), list[dynamic_sampling.Group]()
        size = settings.prompts_per_step
        while size:
            prompts = self._next_prompts(state.prompts_sampled + len(groups), size)
            part = await self._round(prompts, step, state, phases)
            rounds.append(part)
            named = groupby(part.rollouts, key=lambda one: one.completion.name.group)
            groups += [list(members) for _, members in named]
            size = self._further_round(step.number, groups)
        wanted, own = settings.prompts_per_step, sum(map(dynamic_sampling.has_signal, groups))
        kept, surplus = dynamic_sampling.choose(groups, wanted=wanted), max(0, own - wanted)
        return RolloutStep(
            step.number,
            state,
            tuple(rounds),
            [rollout for group in kept for rollout in group],
            replaced=len(groups) - len(kept) - surplus,
            surplus=surplus,
        )

    def _prompts_of(self, step: TrainStep) -> tuple[Prompt, ...]:
        config = self._run.config
        prompts = prompts_for_step(
            self._run.data.train.prompts,
            seed=config.run.seed,
            step=step.number - config.sft_steps,
            prompts_per_step=config.rollout.prompts_per_step,
            weights=self._run.data.weights,
        )
        return evenly_spaced(prompts, step.prompts)

    def _next_prompts(self, sampled: int, size: int) -> tuple[Prompt, ...]:
        assert self._run.config.rollout.max_prompts_per_step is not None
        return consecutive_prompts(
            self._run.data.train.prompts,
            seed=self._run.config.run.seed,
            start=sampled,
            count=size,
            window=self._run.config.rollout.max_prompts_per_step,
            weights=self._run.data.weights,
        )

    async def _round(
        self, prompts: Sequence[Prompt], step: TrainStep, state: SamplingState, phases: PhaseClock
    ) -> SamplingRound:
        """A group for each prompt, and the continuation of partial rollouts."""
        config, workers, began_s = self._run.config, self._run.workers, self._run.clock.now()
        new = [
            RolloutRequest(RolloutName("train", step.number, prompt.id, sample), prompt.tokens)
            for prompt in prompts
            for sample in range(config.rollout.group_size)
        ]
        requests = [*continuations(state.partial), *new]
        early = EarlyScoring(workers.scorer, self._inputs_of)

        def report(completions: Sequence[Completion]) -> None:
            early.add(completions)
            count(completions)

        try:
            with (
                phases.during("sample"),
                self._run.records.activity(f"step {step.number + 1}", "rollouts") as show,
            ):
                count = counting(show, len(requests))
                sampled, work = await workers.generate(
                    requests,
                    temperature=config.rollout.temperature,
                    cut_off=config.rollout.cut_off,
                    deadline=step.deadline,
                    report=report,
                )
                split = split_partial(sampled, state.partial, mode=config.rollout.partial)
                completions = split.finished
                inputs = self._inputs_of(completions)
            with phases.during("reward"):
                outcomes = await workers.score(inputs, deadline=step.deadline, early=early)
                notices = await workers.scorer.notices()
        finally:
            early.cancel()
        for notice in notices:
            self._run.records.say(f"{notice} (all output is in rewards.log)")
        rollouts = score_rollouts(completions, inputs, outcomes, config=config, step=step.number)
        seconds = self._run.clock.now() - began_s
        return SamplingRound(rollouts, split, work, len(prompts), seconds)

    def _inputs_of(self, completions: Sequence[Completion]) -> list[RewardInput]:
        return reward_inputs(completions, self._prompts, maker=self._run.maker, tags=self._tags)

    def _further_round(self, step: int, groups: Sequence[dynamic_sampling.Group]) -> int:
        """Prompts of a further round; 0: none."""
        settings = self._run.config.rollout
        assert settings.max_prompts_per_step is not None
        signal = sum(map(dynamic_sampling.has_signal, groups))
        missing = settings.prompts_per_step - signal
        left = settings.max_prompts_per_step - len(groups)
        has_time = self._run.deadline.allows_step(step, self._run.now_s)
        if missing <= 0 or left <= 0 or not has_time:
            return 0
        return dynamic_sampling.round_size(missing, left=left, signal=signal, groups=len(groups))
