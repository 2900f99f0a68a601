"""A step's rollouts, from prompts to advantages, in one round or with dynamic sampling in several.

    prompts -> [samplers] -> completions -> [scorer] -> rewards -> rollouts -.
       ^                                                                     |
       +-- a further round, while groups are without signal (dynamic.py) ----+

Knows neither when it is called nor what is learned from what it returns. A round's prompts are a
function of what was drawn before, and each decision that looks at a clock is journaled: a resumed
run finds it there and decides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from configs.schema import Config
from pipeline.contracts.clock import Stopwatch
from pipeline.contracts.rollouts import Prompt, RolloutName, RolloutRequest
from pipeline.inputs.dataset.order import consecutive_prompts, evenly_spaced, prompts_for_step
from pipeline.inputs.dataset.splits import LoadedData
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.rollout import dynamic_sampling
from pipeline.rollout.dynamic_sampling import Estimates
from pipeline.rollout.partial import settle
from pipeline.rollout.rollout_step import RolloutStep, Round, Start
from pipeline.rollout.scoring import reward_inputs, score_rollouts
from pipeline.rollout.team import Team
from pipeline.run.run_folder import RunFolder
from rewards.base import Tags


class Drawer:
    """Draws one step after the other.

    Args:
        config: how.
        data: the prompts.
        maker: for turning completions into text.
        team: who does it.
        folder: journals decisions, and has those of an earlier process.
        prompts: of the step that was allowed last; what is drawn in several rounds, or ahead of a
            step, is always of full size.
        may_go_on: whether a step that has come so far may still take its time.
        now: reads the clock, in seconds.
    """

    def __init__(
        self,
        config: Config,
        *,
        data: LoadedData,
        maker: PromptMaker,
        team: Team,
        folder: RunFolder,
        prompts: Callable[[], int],
        may_go_on: Callable[[int], bool],
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._data = data
        self._prompts = {prompt.id: prompt for prompt in data.train.prompts}
        self._maker = maker
        self._tags = Tags.of(config.prompt)
        self._team = team
        self._folder = folder
        self._size = prompts
        self._may_go_on = may_go_on
        self.now = now

    async def draw(self, start: Start, watch: Stopwatch) -> RolloutStep:
        """The rollouts of a step, under the adapter in force.

        Args:
            start: where the data order, rollouts that wait and estimates stand.
            watch: gets laps "sample" and "reward".

        Raises:
            Interrupted: if `stop` was set meanwhile.
        """
        rollout = self._config.rollout
        if rollout.dynamic_sampling == "off":
            only = await self._round(self._first(start), start, watch)
            return RolloutStep(start, (only,), only.rollouts, 0, 0, start.estimates)
        rounds: list[Round] = []
        estimates, gain = start.estimates.faded(), None
        size = rollout.prompts_per_step
        while size:
            drawn = sum(part.prompts for part in rounds)
            prompts = self._next(start.prompts_drawn + drawn, size)
            part = await self._round(prompts, start, watch)
            rounds.append(part)
            estimates = estimates.counted(part.stats.mixed, part.prompts)
            if rollout.dynamic_sampling == "adaptive":
                sampling = estimates.sampling.observed(part.prompts, part.seconds)
                estimates = replace(estimates, sampling=sampling)
            size, asked = self._further(start.step, rounds, estimates)
            gain = asked or gain
        all_rollouts = [rollout for part in rounds for rollout in part.rollouts]
        groups = [
            list(own) for _, own in groupby(all_rollouts, key=lambda one: one.completion.name.group)
        ]
        chosen = dynamic_sampling.choose(groups, wanted=rollout.prompts_per_step)
        return RolloutStep(
            start,
            tuple(rounds),
            [rollout for group in chosen.kept for rollout in group],
            replaced=len(chosen.replaced),
            surplus=len(chosen.surplus),
            estimates=estimates,
            gain=gain,
        )

    def _first(self, start: Start) -> tuple[Prompt, ...]:
        config = self._config
        prompts = prompts_for_step(
            self._data.train.prompts,
            seed=config.run.seed,
            step=start.step - config.sft_steps,
            prompts_per_step=config.rollout.prompts_per_step,
            weights=self._data.weights,
        )
        return evenly_spaced(prompts, self._size())

    def _next(self, drawn: int, size: int) -> tuple[Prompt, ...]:
        assert self._config.rollout.max_prompts_per_step is not None
        return consecutive_prompts(
            self._data.train.prompts,
            seed=self._config.run.seed,
            start=drawn,
            count=size,
            window=self._config.rollout.max_prompts_per_step,
            weights=self._data.weights,
        )

    async def _round(self, prompts: Sequence[Prompt], start: Start, watch: Stopwatch) -> Round:
        """A group for each prompt, and the rest of what waits."""
        config, team, step, began = self._config, self._team, start.step, self.now()
        new = [
            RolloutRequest(RolloutName("train", step, prompt.id, sample), prompt.tokens)
            for prompt in prompts
            for sample in range(config.rollout.group_size)
        ]
        drawn = await team.generate(
            [*start.waiting.requests(), *new],
            temperature=config.rollout.temperature,
            cut_off=config.rollout.cut_off,
        )
        work = team.work
        settled = settle(drawn, start.waiting, partial=config.rollout.partial)
        watch.lap("sample")
        completions = settled.ended
        inputs = reward_inputs(completions, self._prompts, maker=self._maker, tags=self._tags)
        outcomes = await team.unless_stopped(team.scorer.score(inputs))
        rollouts, stats, errors = score_rollouts(
            completions, inputs, outcomes, config=config, step=step
        )
        watch.lap("reward")
        seconds = self.now() - began
        return Round(rollouts, stats, settled, errors, work, len(prompts), seconds)

    def _further(
        self, step: int, rounds: Sequence[Round], estimates: Estimates
    ) -> tuple[int, dynamic_sampling.Gain | None]:
        """Prompts of a further round, 0: there is none; and what was expected of it, if asked."""
        rollout = self._config.rollout
        assert rollout.max_prompts_per_step is not None
        signal = sum(part.stats.mixed for part in rounds)
        missing = rollout.prompts_per_step - signal
        left = rollout.max_prompts_per_step - sum(part.prompts for part in rounds)
        if missing <= 0 or left <= 0:
            return 0, None
        size = dynamic_sampling.round_size(missing, left=left, share=estimates.share)
        made = self._made_before(step, rounds)
        if made is None and not self._may_go_on(step):
            self._journal(step, rounds, prompts=0, why="deadline")
            return 0, None
        if made is not None and made["why"] == "deadline":
            return 0, None
        if rollout.dynamic_sampling == "capped":
            if made is None and self._config.budget.steps is None:
                self._journal(step, rounds, prompts=size, why="time is left")
            return size, None
        found = dynamic_sampling.gain(
            estimates,
            prompts=size,
            signal=signal,
            wanted=missing,
            prompts_per_step=rollout.prompts_per_step,
        )
        if made is not None:
            return made["prompts"], found
        worth = found is not None and found.sampling > found.learning
        facts = {} if found is None else vars(found)
        self._journal(step, rounds, prompts=size if worth else 0, why="gain", **facts)
        return size if worth else 0, found

    def _journal(self, step: int, rounds: Sequence[Round], **facts: Any) -> None:
        self._folder.journal("further_round", step=step + 1, rounds=len(rounds), **facts)

    def _made_before(self, step: int, rounds: Sequence[Round]) -> dict[str, Any] | None:
        """What an earlier process decided at this place; None: none has come so far."""
        made = [
            entry
            for entry in self._folder.events("further_round")
            if (entry["step"], entry["rounds"]) == (step + 1, len(rounds))
        ]
        return made[-1] if made else None
