"""What the plan says of a rehearsal's work: seconds with their range, bytes of a chip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import Config
from pipeline.contracts.model_shape import ModelShape
from pipeline.contracts.programs import LEARNER, SAMPLER
from pipeline.contracts.rollouts import DecodeWork
from pipeline.contracts.speeds import Lengths
from pipeline.inputs.dataset.batching import batch_shape
from pipeline.plan.cost_model.hardware import Topology
from pipeline.plan.cost_model.memory import memory_during
from pipeline.plan.cost_model.roofline import RooflineModel, Seconds, fixed_time
from pipeline.plan.cost_model.step import rewards_s, sync_s
from pipeline.plan.forecast import RunTimes, forecast
from pipeline.plan.search.fitting import PlanCase, estimate_plan


@dataclass(frozen=True)
class Target:
    """What a plan is made for: the sizes of a model, and chips."""

    shape: ModelShape
    topology: Topology


@dataclass(frozen=True)
class Expectations:
    """A plan that is asked about pieces of work.

    Attributes:
        config: with the sizes in force.
        shape: the model.
        model: of its programs on the chips.
        times: of what a run does once.
    """

    config: Config
    shape: ModelShape
    model: RooflineModel
    times: RunTimes

    @staticmethod
    def of(config: Config, target: Target) -> Expectations:
        """For a configuration with sizes."""
        case = PlanCase(config, target.shape, target.topology, Lengths.expected(config))
        plan = estimate_plan(case, config.run.name, config, configured=True)
        outlook = forecast(case, plan)
        times = RunTimes.of(case, plan, outlook.rows, compiling=outlook.compile)
        return Expectations(config, target.shape, case.roofline(config), times)

    def drawing(self, work: DecodeWork, *, seq: int) -> Seconds:
        """What samplers have computed, prompts of `seq` positions; they work side by side."""
        plan, steps = self.config.plan, self.config.segment_steps
        shards = plan.num_samplers * plan.sampler_shards
        total = self.model.prefill(max(1, work.prompt_tokens // shards), seq=seq)
        for slots, segments in work.segments.items():
            each = slots // plan.sampler_shards
            once = self.model.decode_step(each) * steps + self.model.flush(each)
            total += once * (segments / plan.num_samplers)
        return total

    def scoring(self, rows: int) -> Seconds:
        """Scoring so many rows of longest sequences once."""
        return self._batches(rows, score=1)

    def learning(self, rows: int) -> Seconds:
        """Learning from them, what other policies are asked about included."""
        settings = self.config.learner
        others = int(settings.kl_coef > 0) + int(settings.teacher is not None)
        updates = settings.updates_per_batch
        return self._batches(rows, score=others, gradient=updates) + self.model.apply() * updates

    def imitating(self, rows: int) -> Seconds:
        """Learning from so many rows of worked examples."""
        return self._batches(rows, gradient=1) + self.model.apply()

    def sync(self) -> Seconds:
        """Bringing the adapter to all samplers."""
        return sync_s(self.model)

    def rewards(self, rollouts: int) -> Seconds:
        """Scoring the texts of so many rollouts."""
        return rewards_s(rollouts, chip=self.model.chip)

    def bytes_of(self, programs: Sequence[str]) -> int | None:
        """Of a chip at the fullest moment of these programs; None: the plan knows none of them."""
        known = [one for one in programs if one.partition(" ")[0] in SAMPLER + LEARNER]
        found = (memory_during(self.config, self.shape, one, phase=one).total for one in known)
        return max(found, default=None)

    def _batches(self, rows: int, *, score: int = 0, gradient: int = 0) -> Seconds:
        total = fixed_time(0.0, chip=self.model.chip)
        shards, seq = self.config.plan.learner_shards, self.config.rollout.max_tokens
        for size in batch_shape(self.config, pad=0).split(rows):
            positions = size * self.config.row_tokens // shards
            total += self.model.score(positions, seq=seq) * score
            total += self.model.gradient(positions, seq=seq) * gradient
        return total
