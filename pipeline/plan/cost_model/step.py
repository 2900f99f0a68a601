"""Estimated time of a training step: the roofline times of its phases at the expected lengths.

The configuration has sizes. With a cut-off it is a step after many others, which continues their
partial rollouts. The number of groups without signal is unknown before a run, so a step has no
further dynamic-sampling rounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.data.batching import Packing
from pipeline.plan.cost_model.roofline import RooflineModel, Seconds, fixed_time
from pipeline.plan.cost_model.workload import (
    SamplerWork,
    packed_positions,
    sampler_work,
    training_work,
)
from pipeline.plan.lengths import Lengths

_REWARD_S, _REWARD_FLOOR_S = 0.5e-3, 0.05
"""Seconds of rewards, text and records: per rollout, and per step."""
_HOST_BYTES_PER_S, _SYNC_FLOOR_S = 1e9, 0.02
"""Transfer rate of an adapter between processes, and least seconds of a sync."""


@dataclass(frozen=True)
class StepEstimate:
    """Estimate of a GRPO step: time by phase, and the rollouts and tokens that it trains on.

    With `ahead` other chips generate and score the next step's rollouts during the update.
    """

    seconds: Mapping[str, Seconds]
    rollouts: int
    tokens: float
    ahead: bool = False

    @property
    def sampling(self) -> Seconds:
        """Time of generating and scoring the rollouts."""
        return self.seconds["prefill"] + self.seconds["decode"] + self.seconds["rewards"]

    @property
    def learning(self) -> Seconds:
        """Time of scoring by the policies and of the update."""
        return self.seconds["score"] + self.seconds["update"]

    @property
    def total(self) -> Seconds:
        """Time of the step; with `ahead` sampling and learning overlap."""
        both = self.sampling.longer(self.learning) if self.ahead else self.sampling + self.learning
        return both + self.seconds["sync"]

    @property
    def tokens_per_s(self) -> float:
        """Expected trained tokens per second."""
        return self.tokens / self.total.expected


def estimate_step(model: RooflineModel, lengths: Lengths) -> StepEstimate:
    """Estimates a GRPO step at the expected lengths; the model's configuration has sizes."""
    config, rollout = model.config, model.config.rollout
    work = training_work(config, lengths)
    size = round(work.mean.trained * rollout.size)
    tokens = work.mean.trained_tokens * rollout.size
    trained = replace(lengths, completion=tokens * lengths.completion / size)
    seconds = {
        **sampling_seconds(model, work),
        **estimate_learning(model, trained, sequences=size),
        "sync": sync_s(model),
        "rewards": fixed_time(_REWARD_FLOOR_S + _REWARD_S * size),
    }
    return StepEstimate(
        seconds=seconds,
        rollouts=size,
        tokens=size * trained.completion,
        # Virtual CPU devices share the same cores.
        ahead=rollout.ahead != "off" and model.chip.platform != "cpu",
    )


def estimate_sampling(
    model: RooflineModel, lengths: Lengths, *, prompts: int, samples: int
) -> dict[str, Seconds]:
    """Generating `samples` completions for each of `prompts` prompts on all samplers."""
    work = sampler_work(model.config, lengths, prompts=prompts, samples=samples)
    return sampling_seconds(model, work)


def sampling_seconds(model: RooflineModel, work: SamplerWork) -> dict[str, Seconds]:
    """Time of the phases `prefill` and `decode` for a sampler's work."""
    prefill = decode = fixed_time(0.0)
    for slots, number in work.mean.segments.items():
        decode += model.segment(slots) * number
    for bucket, number in work.prefills.items():
        prefill += model.prefill(model.config.prefill_rows(bucket) * bucket, seq=bucket) * number
    return {"prefill": prefill, "decode": decode}


def estimate_learning(
    model: RooflineModel, lengths: Lengths, *, sequences: int
) -> dict[str, Seconds]:
    """Time of the phases `score` and `update` for `sequences` rollouts."""
    config, settings = model.config, model.config.learner
    batches = packed_positions(config, lengths, sequences=sequences)
    shards = config.plan.learner_shards
    score = update = fixed_time(0.0)
    passes = int(settings.kl_coef > 0) + int(settings.teacher is not None)
    packing = Packing.expected(config, lengths)
    for positions, number in Counter(batches).items():
        per_shard = positions // shards
        score += model.score(per_shard, packing) * (passes * number)
        gradient = model.gradient(per_shard, packing)
        update += gradient * (settings.updates_per_batch * number)
    update += model.apply() * settings.updates_per_batch
    return {"score": score, "update": update}


def sft_step_s(model: RooflineModel) -> float:
    """Seconds of a step of the SFT phase."""
    config = model.config
    row, rows = config.row_tokens, config.micro_batch_rows
    number = math.ceil(config.sft.sequences_per_step / rows)
    per_shard = rows * row // config.plan.learner_shards
    longest = float(config.rollout.max_tokens)
    full = Packing(positions=longest, tokens=longest, learned=1.0, sequence=longest)
    return (model.gradient(per_shard, full) * number + model.apply()).expected


def sync_s(model: RooflineModel) -> Seconds:
    """Time of copying the adapter to all samplers."""
    plan, seconds = model.config.plan, _SYNC_FLOOR_S
    if plan.placement == "split":
        adapter = 4 * model.shape.adapter_parameters(model.config.lora)
        seconds += (1 + plan.num_samplers) * adapter / _HOST_BYTES_PER_S
    return fixed_time(seconds)
