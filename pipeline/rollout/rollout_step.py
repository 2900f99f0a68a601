"""The data of one training step: rollouts or demonstrations, and its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from configs.schema import Config
from pipeline.data.packed_batch import PackedRow
from pipeline.progress import Progress, SamplingState
from pipeline.rollout.metrics import step_metrics
from pipeline.rollout.partial import PartialSplit
from pipeline.rollout.scoring import reward_errors
from pipeline.types import DecodeWork, Rollout
from rewards.base import RewardError


@dataclass(frozen=True)
class SamplingRound:
    """Rollouts that were sampled together: whole groups, in the order of their prompts."""

    rollouts: list[Rollout]
    split: PartialSplit
    work: DecodeWork
    prompts: int
    seconds: float


@dataclass(frozen=True)
class RolloutStep:
    """The rollouts of a GRPO step.

    Attributes:
        number: of the step, counted from 0.
        state: the sampling state before the step.
        rounds: at least one.
        rollouts: rollouts to train on: all, or with dynamic sampling as many groups as the step has
            prompts.
        replaced: groups without signal that others replace.
        surplus: groups with signal that are not needed.
    """

    number: int
    state: SamplingState
    rounds: tuple[SamplingRound, ...]
    rollouts: list[Rollout]
    replaced: int = 0
    surplus: int = 0

    learner_prefix = "learner"

    @property
    def name(self) -> str:
        """Name of the file of its records."""
        return f"step_{self.number + 1:06d}"

    @property
    def all_rollouts(self) -> list[Rollout]:
        """All rollouts, those not trained on included."""
        return [rollout for part in self.rounds for rollout in part.rollouts]

    @property
    def split(self) -> PartialSplit:
        """The cut-off of the first round; further rounds have none."""
        return self.rounds[0].split

    @property
    def errors(self) -> dict[str, list[RewardError]]:
        """Errors of reward functions; see `scoring.reward_errors`."""
        return reward_errors(self.all_rollouts)

    @property
    def next_state(self) -> SamplingState:
        """The sampling state after the step."""
        prompts = self.state.prompts_sampled + sum(part.prompts for part in self.rounds)
        return SamplingState(self.split.partial, prompts)

    def counted(self, progress: Progress) -> Progress:
        """Adds the step to the counters."""
        rollouts, tokens = self.all_rollouts, sum(part.split.tokens for part in self.rounds)
        return replace(
            progress,
            samples=progress.samples + len(rollouts),
            tokens_generated=progress.tokens_generated + tokens,
            reward_errors=progress.reward_errors + sum(map(len, self.errors.values())),
            truncated=progress.truncated + self.split.truncated,
            continued=progress.continued + self.split.continued,
            dropped=progress.dropped + self.split.dropped,
            unused=progress.unused + len(rollouts) - len(self.rollouts),
            sampling=self.next_state,
        )

    def metrics(self, config: Config) -> dict[str, float]:
        """Metrics of all sampled rollouts."""
        work = DecodeWork()
        for part in self.rounds:
            work.add(part.work)
        metrics = step_metrics(self.all_rollouts, config) | work.metrics
        if config.rollout.min_prompts_per_step is not None:
            metrics["rollout/prompts_planned"] = float(self.rounds[0].prompts)
        if config.rollout.partial != "off":
            metrics |= self.split.metrics
        if config.rollout.dynamic_sampling != "off":
            metrics |= self._dynamic_metrics()
        if config.rollout.ahead != "off":
            metrics |= self._staleness()
            metrics["time/ahead_s"] = sum(part.seconds for part in self.rounds)
        return metrics

    def _dynamic_metrics(self) -> dict[str, float]:
        kept = {rollout.completion.name for rollout in self.rollouts}
        unused = [
            len(rollout.completion.tokens)
            for rollout in self.all_rollouts
            if rollout.completion.name not in kept
        ]
        return {
            "rollout/rounds": float(len(self.rounds)),
            "rollout/prompts": float(sum(part.prompts for part in self.rounds)),
            "rollout/groups_replaced": float(self.replaced),
            "rollout/groups_surplus": float(self.surplus),
            "rollout/tokens_wasted": float(sum(unused)),
        }

    def _staleness(self) -> dict[str, float]:
        """Policy versions between sampling and training, over trained tokens."""
        if not self.rollouts:
            return {}
        versions = np.concatenate([rollout.completion.versions for rollout in self.rollouts])
        behind = self.number - versions
        return {
            "rollout/staleness_mean": float(behind.mean()),
            "rollout/staleness_max": float(behind.max()),
        }


@dataclass(frozen=True)
class DemonstrationStep:
    """The packed demonstrations of an SFT step.

    Attributes:
        number: of the step, counted from 0.
        sequences: packed rows.
        state: the sampling state, which an SFT step leaves as it is.
    """

    number: int
    sequences: Sequence[PackedRow]
    state: SamplingState

    learner_prefix = "sft"

    @property
    def name(self) -> str:
        """Name of the file of its records."""
        return f"sft_{self.number + 1:06d}"

    @property
    def next_state(self) -> SamplingState:
        """The sampling state after the step."""
        return self.state

    def counted(self, progress: Progress) -> Progress:
        """The counters: all counters of an SFT step come from its update."""
        return progress


TrainingStep = RolloutStep | DemonstrationStep
"""The data of a training step of either phase."""
