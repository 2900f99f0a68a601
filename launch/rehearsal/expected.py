"""The plan's estimates for the phases of a rehearsal: seconds with a range, bytes of a chip."""

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
    """Target of a plan: the shape of a model, and chips."""

    shape: ModelShape
    topology: Topology


@dataclass(frozen=True)
class Expectations:
    """Estimates for given amounts of work.

    Attributes:
        config: with the current sizes.
        shape: of the model.
        model: seconds of its programs on the chips.
        times: seconds of the one-time phases of a run.
    """

    config: Config
    shape: ModelShape
    model: RooflineModel
    times: RunTimes

    @staticmethod
    def of(config: Config, target: Target) -> Expectations:
        """Plans a configuration with sizes."""
        case = PlanCase(config, target.shape, target.topology, Lengths.expected(config))
        plan = estimate_plan(case, config.run.name, config, configured=True)
        outlook = forecast(case, plan)
        times = RunTimes.of(case, plan, outlook.evaluated, compiling=outlook.compile_s)
        return Expectations(config, target.shape, case.roofline(config), times)

    def sampling(self, work: DecodeWork, *, seq: int) -> Seconds:
        """Generation with this amount of work over all samplers, prompts of `seq` positions."""
        plan, steps = self.config.plan, self.config.segment_steps
        shards = plan.num_samplers * plan.sampler_shards
        total = self.model.prefill(max(1, work.prompt_tokens // shards), seq=seq)
        for slots, segments in work.segments.items():
            each = slots // plan.sampler_shards
            once = self.model.decode_step(each) * steps + self.model.flush(each)
            total += once * (segments / plan.num_samplers)
        return total

    def scoring(self, rows: int) -> Seconds:
        """One scoring pass over `rows` full rows."""
        return self._batches(rows, score=1)

    def update(self, rows: int) -> Seconds:
        """One update step on `rows` full rows, scoring by reference policies included."""
        settings = self.config.learner
        references = int(settings.kl_coef > 0) + int(settings.teacher is not None)
        updates = settings.updates_per_batch
        return (
            self._batches(rows, score=references, gradient=updates) + self.model.apply() * updates
        )

    def sft_update(self, rows: int) -> Seconds:
        """One SFT update on `rows` full rows of demonstrations."""
        return self._batches(rows, gradient=1) + self.model.apply()

    def sync(self) -> Seconds:
        """Publishing the adapter to all samplers."""
        return sync_s(self.model)

    def rewards(self, rollouts: int) -> Seconds:
        """Reward functions on this number of rollouts."""
        return rewards_s(rollouts, chip=self.model.chip)

    def bytes_of(self, programs: Sequence[str]) -> int | None:
        """Peak bytes of a chip over these programs; None: the plan knows none of them."""
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
