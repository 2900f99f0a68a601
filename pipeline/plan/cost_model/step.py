"""What a step takes: the work of its phases at the pace of the chips, by expected lengths.

Reads configurations whose sizes are set. Partial rollouts and cut-offs are not counted: a step is
what it takes to draw and learn all of the rollouts that it asks for first. How many groups are
without signal is not known before a run, so with dynamic sampling that is what is expected, and
the most that a step may draw is the upper end of what drawing takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from configs.schema import Config
from pipeline.contracts.model_shape import ModelShape
from pipeline.contracts.speeds import Lengths
from pipeline.plan.cost_model.hardware import Chip
from pipeline.plan.cost_model.timing import Pace, Seconds, fixed
from pipeline.plan.cost_model.workload import expected_turns, packed_positions

PHASES = ("prefill", "decode", "score", "update", "sync", "rewards")
"""Of a step, in their order; sync: the samplers take over the adapter."""

_REWARD_S, _REWARD_FLOOR_S = 0.5e-3, 0.05
"""Of a rollout's rewards, text and records, and of a step's."""
_HOST_BYTES_PER_S, _SYNC_FLOOR_S = 1e9, 0.02
"""Of an adapter on its way from one process to another, and what taking it over takes at least."""


@dataclass(frozen=True)
class Drawing:
    """Drawing some rollouts on all samplers.

    Attributes:
        prefill: reading the prompts.
        decode: drawing the tokens.
        slots_useful: share of the slots' steps that draw a token.
    """

    prefill: Seconds
    decode: Seconds
    slots_useful: float


@dataclass(frozen=True)
class Step:
    """A step of GRPO.

    Attributes:
        seconds: by phase.
        rollouts: that it learns from.
        tokens: of their completions, which are drawn and trained.
        padding: share of the learner's positions that hold nothing.
        slots_useful: see `Drawing`.
        knee: slots of a shard from which more of them hardly draw faster.
        ahead: whether the next step's rollouts are drawn and scored while these are learned, by
            other chips.
    """

    seconds: Mapping[str, Seconds]
    rollouts: int
    tokens: float
    padding: float
    slots_useful: float
    knee: int
    ahead: bool = False

    @property
    def total(self) -> Seconds:
        """All phases, one after the other, but for those that others do meanwhile."""
        drawn = self._sum("prefill", "decode", "rewards")
        learned = self._sum("score", "update")
        both = drawn.longer(learned) if self.ahead else drawn + learned
        return both + self.seconds["sync"]

    def _sum(self, first: str, *others: str) -> Seconds:
        return sum((self.seconds[phase] for phase in others), self.seconds[first])

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second, as expected."""
        return self.tokens / self.total.expected


def step_of(config: Config, shape: ModelShape, *, chip: Chip, lengths: Lengths) -> Step:
    """What a step of GRPO takes.

    Args:
        config: with sizes.
        shape: the model.
        chip: each of those that it runs on.
        lengths: that are expected.
    """
    pace, rollout = Pace(config, shape, chip), config.rollout
    drawn = drawing(pace, lengths, prompts=rollout.prompts_per_step, samples=rollout.group_size)
    learned = learning(pace, lengths)
    size = rollout.size
    seconds = {
        "prefill": drawn.prefill,
        "decode": drawn.decode,
        **learned,
        "sync": sync_s(pace),
        "rewards": rewards_s(size, chip=chip),
    }
    if rollout.max_prompts_per_step is not None:
        # All further prompts as one round.
        more = rollout.max_prompts_per_step - rollout.prompts_per_step
        further = drawing(pace, lengths, prompts=more, samples=rollout.group_size)
        rewarded = rewards_s(more * rollout.group_size, chip=chip)
        seconds |= {
            "prefill": _at_most(seconds["prefill"], further.prefill),
            "decode": _at_most(seconds["decode"], further.decode),
            "rewards": _at_most(seconds["rewards"], rewarded),
        }
    positions = sum(packed_positions(config, lengths, sequences=size))
    return Step(
        seconds=seconds,
        rollouts=size,
        tokens=size * lengths.completion,
        padding=1 - size * lengths.sequence / positions,
        slots_useful=drawn.slots_useful,
        knee=pace.knee(),
        # A CPU's virtual devices are the same cores.
        ahead=rollout.ahead != "off" and chip.platform != "cpu",
    )


def _at_most(seconds: Seconds, further: Seconds) -> Seconds:
    """With something that may come after it, and is not expected to."""
    return replace(seconds, high=seconds.high + further.high)


def drawing(pace: Pace, lengths: Lengths, *, prompts: int, samples: int) -> Drawing:
    """Drawing `samples` completions to each of so many prompts, on all samplers."""
    config, plan, chip = pace.config, pace.config.plan, pace.chip
    count = max(1, math.ceil(prompts / plan.num_samplers) * samples)
    shards, steps = plan.sampler_shards, config.segment_steps
    turns = expected_turns(
        count,
        mean=lengths.completion,
        cap=config.rollout.max_new_tokens,
        sizes=tuple(size // shards for size in plan.slot_ladder),
        segment_steps=steps,
        shards=shards,
    )
    decode, computed = fixed(0.0, chip=chip), 0.0
    for slots, number in turns.segments.items():
        decode += (pace.decode_step(slots) * steps + pace.settle(slots)) * number
        computed += slots * shards * steps * number
    bucket = config.prompt_bucket(min(round(lengths.prompt), config.rollout.max_prompt_tokens))
    rows = config.prefill_rows(bucket)
    reads = math.ceil(math.ceil(prompts / (plan.num_samplers * shards)) / rows)
    prefill = pace.prefill(rows * bucket, seq=bucket) * reads
    return Drawing(prefill, decode, count * lengths.completion / computed)


def learning(pace: Pace, lengths: Lengths) -> dict[str, Seconds]:
    """Scoring and learning the rollouts of a step."""
    config, settings = pace.config, pace.config.learner
    batches = packed_positions(config, lengths, sequences=config.rollout.size)
    shards = config.plan.learner_shards
    score = update = fixed(0.0, chip=pace.chip)
    passes = int(settings.kl_coef > 0) + int(settings.teacher is not None)
    for positions, number in Counter(batches).items():
        each = positions // shards
        score += pace.score(each, seq=lengths.sequence) * (passes * number)
        gradient = pace.gradient(each, seq=lengths.sequence)
        update += gradient * (settings.updates_per_batch * number)
    update += pace.apply() * settings.updates_per_batch
    return {"score": score, "update": update}


def imitation_s(pace: Pace) -> Seconds:
    """A step of the warm start."""
    config = pace.config
    row, rows = config.row_tokens, config.micro_batch_rows
    number = math.ceil(config.sft.sequences_per_step / rows)
    each = rows * row // config.plan.learner_shards
    return pace.gradient(each, seq=config.rollout.max_tokens) * number + pace.apply()


def rewards_s(rollouts: int, *, chip: Chip) -> Seconds:
    """Rewards, text and records of so many rollouts."""
    return fixed(_REWARD_FLOOR_S + _REWARD_S * rollouts, chip=chip)


def sync_s(pace: Pace) -> Seconds:
    """Bringing the adapter to all samplers."""
    plan, seconds = pace.config.plan, _SYNC_FLOOR_S
    if plan.placement == "split":
        adapter = 4 * pace.shape.adapter_parameters(pace.config.lora)
        seconds += (1 + plan.num_samplers) * adapter / _HOST_BYTES_PER_S
    return fixed(seconds, chip=pace.chip)
