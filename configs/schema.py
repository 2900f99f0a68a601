"""The configuration schema of a run: every setting with its type, meaning and default.

The schema imports nothing heavier than pydantic, so `--help` and `--dry-run` are fast. Derived
numbers are properties, never fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from typing import Literal, TypeVar

from configs.alarms import AlarmRule, Alarms, Disagreement
from configs.base import Problem, Table, next_multiple
from configs.budget import Budget
from configs.evaluation import EXACT_ANSWER, WEIGHTED_SUM, Eval, unused_extraction
from configs.learner import Learner, Sft
from configs.mismatch import Mismatch, MismatchBounds, measured_bounds
from configs.model import Export, Lora, Model
from configs.plan import Plan
from configs.rollout import Rollout, min_finished
from configs.run import Checkpoint, Faults, Profile, Records, Run
from configs.task import (
    ACCURACY_REWARDS,
    CORRECTNESS_REWARDS,
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
    "Alarms",
    "Budget",
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
    "Wandb",
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

    def problems(self) -> Iterator[Problem]:
        """Yields a problem for each setting that does not suit the others.

        A check is skipped if it reads a setting that this configuration lacks (see `without`), and
        a check between tables also if it reads a setting that has a problem within its table: one
        mistake does not hide others, and does not count twice.
        """
        within = list(_table_problems(self))
        yield from within
        rest = without(self, *(key for key, _ in within))
        for check in _CROSS_CHECKS:
            with suppress(AttributeError):
                yield from check(rest)

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
        found = (one for one in self.rewards.functions if one.function in CORRECTNESS_REWARDS)
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
        if part is not None and part.function in CORRECTNESS_REWARDS:
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

    def alarm_rule(self, name: str) -> AlarmRule:
        """The settings of a rule of `alarms`, with its threshold."""
        rule = self.alarms.rule(name)
        if isinstance(rule, Disagreement) and rule.above is None:
            return rule.model_copy(update={"above": self.mismatch_bounds.p999})
        return rule

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
        that is longer.
        """
        if self.plan.row_tokens is not None:
            return self.plan.row_tokens
        rollout = self.rollout
        if not self.shares_prefix:
            return rollout.max_tokens
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
                f"a row of {self.row_tokens} tokens for each of {plan.learner_shards} parts of the "
                "learner",
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


T = TypeVar("T", bound=Table)


def without(table: T, *keys: str) -> T:
    """A copy of the table without these settings; reading one of them raises AttributeError.

    Args:
        table: a table, or the whole configuration.
        keys: dotted keys; of a list all elements are left out.
    """
    rest = table.model_copy()
    for key in keys:
        name, _, inner = key.partition(".")
        value = vars(rest).pop(name, None)
        if inner and isinstance(value, Table):
            vars(rest)[name] = without(value, inner)
    return rest


def _table_problems(config: Config) -> Iterator[Problem]:
    for key, table in _tables(config):
        with suppress(AttributeError):
            for inner, what in table.conflicts():
                yield f"{key}.{inner}".strip("."), what


def _tables(table: Table, key: str = "") -> Iterator[tuple[str, Table]]:
    """The tables in `table`, then itself, with their dotted keys."""
    for name in type(table).model_fields:
        value, inner = getattr(table, name, None), f"{key}.{name}".strip(".")
        if isinstance(value, Table):
            yield from _tables(value, inner)
        elif isinstance(value, tuple):
            for number, element in enumerate(value):
                if isinstance(element, Table):
                    yield from _tables(element, f"{inner}.{number}")
    yield key, table


def _schedule_problems(config: Config) -> Iterator[Problem]:
    learner, end = config.learner, config.decay_steps
    if learner.schedule == "constant":
        yield from learner.unused("decay_steps", why="with a constant schedule", table="learner")
    elif end is not None and learner.warmup_steps >= end:
        what = f"must be below the end of the decay, step {end}; nearest valid: {end - 1}"
        yield "learner.warmup_steps", what


def _bucket_problems(config: Config) -> Iterator[Problem]:
    longest, buckets = config.rollout.max_prompt_tokens, config.plan.prompt_buckets
    valid = sorted({size for size in buckets if size < longest})
    if valid != list(buckets):
        what = f"must be ascending and below {longest}, which is always a bucket"
        yield "plan.prompt_buckets", f"{what}; nearest valid: {valid}"


def _row_problems(config: Config) -> Iterator[Problem]:
    plan, longest = config.plan, config.rollout.max_tokens
    if plan.row_tokens is not None and plan.row_tokens < longest:
        what = f"must hold the longest sequence, {longest} tokens; nearest valid: {longest}"
        yield "plan.row_tokens", what


def _rollout_weights_problems(config: Config) -> Iterator[Problem]:
    kind, model = config.plan.rollout_weights, config.model
    if kind == "shared":
        return
    if model.quantization != "none":
        what = f'needs model.quantization = "none", not "{model.quantization}"'
        yield "plan.rollout_weights", f'{what}; nearest valid: "shared"'
    rounds = kind != "merged" or model.dtype != "float32"
    if rounds and config.learner.importance_cap == 0:
        base = f" with a {model.dtype} base" if kind == "merged" else ""
        what = (
            f'plan.rollout_weights = "{kind}"{base} rounds differently from the learner, which '
            'needs importance weights; nearest valid: 2.0, or plan.rollout_weights = "shared"'
        )
        yield "learner.importance_cap", what


def _overlong_problems(config: Config) -> Iterator[Problem]:
    names = [part.name for part in config.rewards.functions]
    if config.rollout.overlong_tokens and OVERLONG in names:
        what = f"{OVERLONG!r} is the name of the part of rollout.overlong_tokens; choose another"
        yield "rewards.functions", what


def _partial_problems(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.cut_off is not None:
        prompts = -(-rollout.prompts_per_step // config.plan.num_samplers)
        share = prompts * rollout.group_size
        if min_finished(share, cut_off=rollout.cut_off) == share:
            nearest = math.floor(100 * (share - 1) / share) / 100
            what = f"would truncate none of a sampler's {share} rollouts in a step"
            yield "rollout.cut_off", f"{what}; nearest valid: {nearest}"
            return
    if rollout.partial == "keep" and not config.learner.importance_cap:
        what = (
            '"keep" trains on tokens of older policy versions, which needs importance weights; set '
            "learner.importance_cap above 0, e.g. 2"
        )
        yield "rollout.partial", what


def _ahead_problems(config: Config) -> Iterator[Problem]:
    if config.rollout.ahead == "off":
        return
    if config.plan.placement != "split" and not config.plan.searches_placement:
        what = (
            'needs plan.placement = "split": a process that owns all devices cannot sample and '
            'learn at the same time; nearest valid: "off"'
        )
        yield "rollout.ahead", what
    if not config.learner.importance_cap:
        what = (
            '"one" trains on rollouts of the previous policy version, which needs importance '
            "weights; set learner.importance_cap above 0, e.g. 2"
        )
        yield "rollout.ahead", what


def _shrink_problems(config: Config) -> Iterator[Problem]:
    rollout, key = config.rollout, "rollout.min_prompts_per_step"
    if rollout.min_prompts_per_step is None:
        return
    if config.budget.steps is not None:
        yield key, "has no effect with budget.steps, where all steps have one size; remove it"
    elif rollout.dynamic_sampling != "off":
        what = 'needs rollout.dynamic_sampling = "off", which refills steps; remove one of them'
        yield key, what
    elif rollout.ahead != "off":
        what = 'needs rollout.ahead = "off", which samples before a step is sized; remove one'
        yield key, what


def _validation_problems(config: Config) -> Iterator[Problem]:
    if not config.validates:
        why = "without data.validation"
        yield from config.eval.unused("every_steps", "every_minutes", why=why, table="eval")


def _alarm_problems(config: Config) -> Iterator[Problem]:
    useless = dict[str, str]()
    if not config.validates:
        why = "without data.validation"
        useless |= {"validation_falls": why, "rising_while_validation_falls": why}
    if sum(weight != 0 for weight in config.reward_weights.values()) < 2:
        useless["dominating"] = "with less than two weighted rewards"
    if config.learner.kl_coef == 0:
        why = "with learner.kl_coef = 0, where there is no reference to compare with"
        useless["kl"] = why
    for name, why in useless.items():
        rule = config.alarms.rule(name)
        yield from rule.unused(*type(rule).model_fields, why=why, table=f"alarms.{name}")


def _metric_problems(config: Config) -> Iterator[Problem]:
    for part in config.rewards.functions:
        if part.name in {EXACT_ANSWER, WEIGHTED_SUM}:
            what = f'"{part.name}" is a value of eval.metric of its own; name the part otherwise'
            yield "rewards.functions", what
    metric, names = config.eval.metric, config.metric_names
    if metric is None:
        return
    if metric not in names:
        (nearest,) = get_close_matches(metric, names, n=1, cutoff=0.0)
        what = f"is not the name of a reward part, {EXACT_ANSWER} or {WEIGHTED_SUM}"
        yield "eval.metric", f'{what}; nearest valid: "{nearest}", of {", ".join(names)}'
    elif config.eval.extraction is not None and metric != EXACT_ANSWER:
        yield "eval.extraction", unused_extraction(metric)


def _chip_problems(config: Config) -> Iterator[Problem]:
    if config.plan.platform != "tpu":
        why = f'with plan.platform = "{config.plan.platform}"'
        yield from config.run.unused("tpu_chips", why=why, table="run")


def _sft_problems(config: Config) -> Iterator[Problem]:
    sft, steps = config.sft, config.budget.steps
    if not config.run.has_sft_phase:
        why = 'without "sft" in run.phases'
        yield from sft.unused(*Sft.model_fields, why=why, table="sft")
        return
    if sft.train is None:
        yield "sft.train", 'is required for run.phases = ["sft", "grpo"]'
    if steps is not None and sft.steps >= steps:
        what = f"must be below budget.steps = {steps}, to leave steps for GRPO"
        yield "sft.steps", f"{what}; nearest valid: {steps - 1}"


def _profile_problems(config: Config) -> Iterator[Problem]:
    steps, profiled = config.budget.steps, config.profile.range
    if profiled is not None and steps is not None and profiled[0] > steps:
        what = f'there are only budget.steps = {steps} steps; nearest valid: "{steps}"'
        yield "profile.steps", what


_CROSS_CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _schedule_problems,
    _bucket_problems,
    _row_problems,
    _rollout_weights_problems,
    _overlong_problems,
    _partial_problems,
    _ahead_problems,
    _shrink_problems,
    _validation_problems,
    _alarm_problems,
    _metric_problems,
    _chip_problems,
    _sft_problems,
    _profile_problems,
)
"""Checks between tables that are valid by themselves."""
