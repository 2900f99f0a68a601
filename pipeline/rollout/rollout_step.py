"""What a step's drawing begins with, and what comes of it; metrics of what was drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from configs.schema import Config
from pipeline.contracts.clock import Stopwatch
from pipeline.contracts.rollouts import DecodeWork, Rollout
from pipeline.rollout.advantages import GroupStats
from pipeline.rollout.dynamic_sampling import Estimates, Gain
from pipeline.rollout.metrics import step_metrics
from pipeline.rollout.partial import PartialRollouts, PartialSplit


@dataclass(frozen=True)
class Start:
    """What the drawing of a step's rollouts goes by, beside the seed and the policy.

    Attributes:
        step: counted from 0.
        waiting: rollouts that were cut before.
        prompts_drawn: prompts that the steps before have drawn.
        estimates: with dynamic sampling, what they have measured.
    """

    step: int
    waiting: PartialRollouts = field(default_factory=PartialRollouts)
    prompts_drawn: int = 0
    estimates: Estimates = field(default_factory=Estimates)


@dataclass(frozen=True)
class Round:
    """Rollouts that were drawn together, in whole groups, in the order of their prompts."""

    rollouts: list[Rollout]
    stats: GroupStats
    settled: PartialSplit
    errors: Mapping[str, list[str]]
    work: DecodeWork
    prompts: int
    seconds: float


@dataclass(frozen=True)
class RolloutStep:
    """A step's rollouts.

    Attributes:
        start: what they were drawn by.
        rounds: as they were drawn, at least one.
        rollouts: what is learned from: all, or with dynamic sampling as many groups as the step
            has prompts.
        replaced: groups without signal for which others were drawn.
        surplus: groups with signal that were not needed.
        estimates: with this step's counts and rounds in them.
        gain: what was expected when it was last asked whether to draw on; None: it never was.
    """

    start: Start
    rounds: tuple[Round, ...]
    rollouts: list[Rollout]
    replaced: int
    surplus: int
    estimates: Estimates
    gain: Gain | None = None

    @property
    def all_rollouts(self) -> list[Rollout]:
        """Those too that are not learned from."""
        return [rollout for part in self.rounds for rollout in part.rollouts]

    @property
    def overflow(self) -> int:
        """Groups whose rewards are so large that computing their advantages overflows."""
        return sum(part.stats.overflow for part in self.rounds)

    @property
    def settled(self) -> PartialSplit:
        """What became of the first round's rollouts; the other rounds have no cut-off."""
        return self.rounds[0].settled

    @property
    def tokens(self) -> int:
        """Tokens that were drawn in this step."""
        return sum(part.settled.tokens for part in self.rounds)

    @property
    def seconds(self) -> float:
        """What sampling and rewards took."""
        return sum(part.seconds for part in self.rounds)

    @property
    def errors(self) -> dict[str, list[str]]:
        """See `scoring.reward_errors`."""
        found: dict[str, list[str]] = {}
        for part in self.rounds:
            for name, reasons in part.errors.items():
                found.setdefault(name, []).extend(reasons)
        return found

    def learned(self, watch: Stopwatch) -> Estimates:
        """The estimates with what the update took; `watch` has laps "learn" and "sync"."""
        estimates, laps = self.estimates, watch.metrics()
        if not estimates.sampling.weight:  # nobody asks for seconds
            return estimates
        learned = sum(part.stats.mixed for part in self.rounds) - self.surplus
        seconds = laps["time/learn_s"] + laps["time/sync_s"]
        return replace(estimates, learning=estimates.learning.observed(learned, seconds))

    @property
    def following(self) -> Start:
        """What the next step is drawn by."""
        drawn = self.start.prompts_drawn + sum(part.prompts for part in self.rounds)
        return Start(self.start.step + 1, self.settled.waiting, drawn, self.estimates)

    def metrics(self, config: Config) -> dict[str, float]:
        """What W&B and the run folder are told: of all that was drawn, learned from or not."""
        work, counts = DecodeWork(), [vars(part.stats) for part in self.rounds]
        for part in self.rounds:
            work.add(part.work)
        stats = GroupStats(**{name: sum(count[name] for count in counts) for name in counts[0]})
        metrics = step_metrics(self.all_rollouts, stats) | work.metrics
        if config.rollout.partial != "off":
            metrics |= self.settled.metrics
        if config.rollout.dynamic_sampling != "off":
            metrics |= self._dynamic_metrics()
        if config.rollout.ahead != "off":
            metrics |= self._staleness() | {"time/drawing_s": self.seconds}
        return metrics

    def _dynamic_metrics(self) -> dict[str, float]:
        kept = {rollout.completion.name for rollout in self.rollouts}
        unused = [
            len(rollout.completion.tokens)
            for rollout in self.all_rollouts
            if rollout.completion.name not in kept
        ]
        wasted = sum(unused) / max(1, self.tokens)
        metrics = {
            "rollout/rounds": float(len(self.rounds)),
            "rollout/prompts": float(sum(part.prompts for part in self.rounds)),
            "rollout/groups_replaced": float(self.replaced),
            "rollout/groups_surplus": float(self.surplus),
            "rollout/tokens_wasted": float(sum(unused)),
            "rollout/signal_share": self.estimates.share,
            "time/wasted_s": wasted * self.seconds,
        }
        if self.gain is not None:
            metrics["rollout/gain_sampling"] = self.gain.sampling
            metrics["rollout/gain_learning"] = self.gain.learning
        return metrics

    def _staleness(self) -> dict[str, float]:
        """How many versions behind the learner's each learned token was drawn."""
        if not self.rollouts:
            return {}
        versions = np.concatenate([rollout.completion.versions for rollout in self.rollouts])
        behind = self.start.step - versions
        return {
            "rollout/staleness_mean": float(behind.mean()),
            "rollout/staleness_max": float(behind.max()),
        }
