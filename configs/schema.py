"""The configuration schema of a run: every setting with its type, meaning and default.

The schema imports nothing heavier than pydantic, so `--help` and `--dry-run` are fast. Derived
numbers are properties, never fields.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from configs.alarms import Alarms
from configs.base import Table, next_multiple
from configs.budget import Budget
from configs.evaluation import EXACT_ANSWER, WEIGHTED_SUM, Eval
from configs.learner import Learner, Sft
from configs.mismatch import Mismatch, MismatchBounds, measured_bounds
from configs.model import Export, Lora, Model
from configs.plan import Plan
from configs.rollout import Rollout
from configs.run import Checkpoint, Faults, Profile, Records, Run
from configs.task import (
    ACCURACY_REWARDS,
    OVERLONG,
    AnswerPlace,
    Data,
    NamedSource,
    Prompt,
    RewardFunction,
    Rewards,
    Shot,
    Source,
)
from configs.wandb import Wandb

__all__ = [
    "Config",
    "Data",
    "Faults",
    "Learner",
    "Lora",
    "Model",
    "NamedSource",
    "Plan",
    "Prompt",
    "RewardFunction",
    "Rewards",
    "Rollout",
    "Shot",
    "Source",
]


_VALIDATIONS = 10
"""Validations of a budget without `eval.every_steps` and `eval.every_minutes`."""
_VALIDATION_MINUTES = 30.0
"""The same with `budget.until`."""
_LONG_ROW = 2048
"""Tokens of a packed row that holds all or most of a group; longer ones save little."""


class Config(Table):
    """Configuration of a run."""

    run: Run
    model: Model
    lora: Lora = Lora()
    sft: Sft = Sft()
    data: Data
    prompt: Prompt = Prompt()
    rewards: Rewards
    rollout: Rollout
    learner: Learner = Learner()
    plan: Plan = Plan()
    budget: Budget
    eval: Eval = Eval()
    export: Export = Export()
    checkpoint: Checkpoint = Checkpoint()
    mismatch: Mismatch = Mismatch()
    wandb: Wandb = Wandb()
    records: Records = Records()
    profile: Profile = Profile()
    alarms: Alarms = Alarms()
    faults: Faults = Faults()

    @property
    def has_initial_adapter(self) -> bool:
        """Whether training begins from a trained adapter."""
        return self.lora.start is not None or self.run.fork is not None

    @property
    def version_0(self) -> str:
        """What the model before training is called: `initial` with an adapter, or `untrained`."""
        return "initial" if self.has_initial_adapter else "untrained"

    @property
    def metric(self) -> str:
        """`eval.metric`, or the default that the rewards give."""
        if self.eval.metric is not None:
            return self.eval.metric
        found = (one for one in self.rewards.functions if one.function in ACCURACY_REWARDS)
        part = next(found, None)
        if part is None or self.eval.extraction is not None:
            return EXACT_ANSWER
        # Both measure the same, and `exact_answer` needs no reward process.
        is_exact = part.function == ACCURACY_REWARDS[0] and not part.args
        return EXACT_ANSWER if is_exact else part.name

    @property
    def metric_names(self) -> list[str]:
        """The values that `eval.metric` can have."""
        return [EXACT_ANSWER, WEIGHTED_SUM, *self.reward_weights]

    @property
    def uses_rewards(self) -> bool:
        """Whether the metric is a reward."""
        return self.metric != EXACT_ANSWER

    @property
    def has_accuracy_reward(self) -> bool:
        """Whether the metric is a reward that gives 1 to right answers and 0 to wrong ones."""
        part = self._metric_part
        return part is not None and part.function in ACCURACY_REWARDS

    @property
    def extraction(self) -> AnswerPlace:
        """Where the answer is in evaluations: where a library reward as metric finds it."""
        part, place = self._metric_part, self.prompt.answer
        if part is not None and part.function in ACCURACY_REWARDS:
            place = part.args.get("extraction", place)
        return self.eval.extraction or place

    @property
    def _metric_part(self) -> RewardFunction | None:
        if not self.uses_rewards:
            return None
        return next((part for part in self.rewards.functions if part.name == self.metric), None)

    def with_metric(self, metric: str) -> Config:
        """The same with `eval.metric` set."""
        return self.model_copy(update={"eval": self.eval.model_copy(update={"metric": metric})})

    @property
    def validates(self) -> bool:
        """Whether a validation split is evaluated during training."""
        return self.data.validation is not None

    @property
    def validation_steps(self) -> int | None:
        """Steps between two validations; None: there are none, or minutes count."""
        if not self.validates or self.eval.every_minutes is not None:
            return None
        if self.eval.every_steps:
            return self.eval.every_steps
        steps = self.budget.steps
        return None if steps is None else math.ceil(steps / _VALIDATIONS)

    @property
    def validation_minutes(self) -> float | None:
        """Minutes between two validations; None: there are none, or steps count."""
        if not self.validates or self.validation_steps is not None:
            return None
        if self.eval.every_minutes is not None:
            return self.eval.every_minutes
        time_s = self.budget.time_s
        return _VALIDATION_MINUTES if time_s is None else time_s / 60 / _VALIDATIONS

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each part of the reward, that of `rollout.overlong_tokens` included."""
        overlong = {OVERLONG: 1.0} if self.rollout.overlong_tokens else {}
        return {part.name: part.weight for part in self.rewards.functions} | overlong

    @property
    def mismatch_bounds(self) -> MismatchBounds:
        """Bounds of the difference between sampler and learner: configured, else measured ones."""
        given = self.mismatch.model_dump(exclude_none=True)
        return replace(measured_bounds(self.model, self.plan), **given)

    @property
    def sft_steps(self) -> int:
        """Number of steps of the SFT phase, which precedes GRPO."""
        return self.sft.steps if self.run.has_sft_phase else 0

    def phase_of(self, step: int) -> Literal["sft", "grpo"]:
        """The training phase of a step, counted from 0."""
        return "sft" if step < self.sft_steps else "grpo"

    @property
    def decay_steps(self) -> int | None:
        """GRPO step at which the learning rate reaches zero; None if the clock decides."""
        if self.learner.decay_steps is not None or self.budget.steps is None:
            return self.learner.decay_steps
        return self.budget.steps - self.sft_steps

    @property
    def plans_decay(self) -> bool:
        """Whether the end of the learning rate's decay is estimated from measured step times."""
        return self.learner.schedule != "constant" and self.decay_steps is None

    @property
    def prompt_buckets(self) -> tuple[int, ...]:
        """Prompt lengths with a compiled prefill, ascending."""
        return (*self.plan.prompt_buckets, *self.rollout.prefill_lengths)

    @property
    def segment_steps(self) -> int:
        """Decode steps of a segment: at most the length of a completion."""
        return min(self.plan.segment_steps, self.rollout.max_new_tokens)

    def prompt_bucket(self, tokens: int) -> int:
        """The smallest prompt bucket that holds this many tokens."""
        return min(size for size in self.prompt_buckets if size >= tokens)

    def prefill_rows(self, bucket: int) -> int:
        """Prompts of this bucket that each shard of a sampler prefills at a time."""
        slots = self.slots // self.plan.sampler_shards
        return max(1, min(slots, self.plan.prefill_tokens // bucket))

    @property
    def sampler_quantization(self) -> str:
        """Quantization of the samplers' matrices: a value of `model.quantization`."""
        kind = self.plan.rollout_weights
        return kind if kind in {"int8", "int8_matmul"} else self.model.quantization

    @property
    def shares_prefix(self) -> bool:
        """Whether a row has a prompt once for all its rollouts of the group."""
        if self.learner.share_prefix is not None:
            return self.learner.share_prefix
        prompt, completion = self.rollout.expected_prompt, self.rollout.expected_completion
        saved = prompt * (1 - 1 / self.rollout.group_size)
        return saved >= 0.1 * (prompt + completion)

    @property
    def row_tokens(self) -> int:
        """Tokens of a packed row.

        By default the longest sequence, or a group of expected lengths that shares its prompt, if
        that is longer; where completions are short beside prompts, a group of the longest lengths.
        """
        if self.plan.row_tokens is not None:
            return self.plan.row_tokens
        rollout = self.rollout
        if not self.shares_prefix:
            return rollout.max_tokens
        longest = rollout.max_prompt_tokens + rollout.group_size * rollout.max_new_tokens
        if longest <= min(_LONG_ROW, 2 * rollout.max_tokens):
            return longest
        group = rollout.expected_prompt + rollout.group_size * rollout.expected_completion
        return max(rollout.max_tokens, min(_LONG_ROW, math.ceil(group)))

    @property
    def slots(self) -> int:
        """Slots of a sampler; available after planning."""
        return self.plan.slot_ladder[0]

    @property
    def micro_batch_rows(self) -> int:
        """Packed rows of a micro-batch over all learner devices; available after planning."""
        assert self.plan.micro_batch_tokens is not None, "sizes are not planned yet"
        return self.plan.micro_batch_tokens // self.row_tokens

    def rounded(self) -> tuple[Config, list[str]]:
        """The same with whole sizes on each device, and what was rounded up, in words."""
        plan, changes, said = self.plan, dict[str, object](), list[str]()
        units = {
            "slots": (plan.sampler_shards, "the parts of a sampler"),
            "micro_batch_tokens": (
                self.row_tokens * plan.learner_shards,
                f"a row of {self.row_tokens} tokens for {plan.learner_shards} parts of the learner",
            ),
        }
        for key, (unit, why) in units.items():
            size = getattr(plan, key)
            if size is not None and size % unit:
                changes[key] = next_multiple(size, unit)
                multiple = f"a multiple of {unit}, {why}"
                said.append(f"plan.{key} = {size} is rounded up to {changes[key]}: {multiple}")
        if not changes:
            return self, []
        return self.model_copy(update={"plan": plan.model_copy(update=changes)}), said
