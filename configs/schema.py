"""The configuration schema of a run: every setting with its type, meaning and default.

The schema imports nothing heavier than pydantic, so `--help` and `--dry-run` are fast. Derived
numbers are properties, never fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from configs.alarms import AlarmRule, Alarms, Disagreement
from configs.base import (
    FREE,
    VERSION,
    FolderPath,
    MirrorURL,
    OutputPath,
    Problem,
    Slug,
    Table,
    Text,
    nearest_multiples,
    parse_duration_s,
)
from configs.budget import Budget
from configs.evaluation import EXACT_ANSWER, Eval, default_metric, metric_problems
from configs.learner import Learner, Sft
from configs.mismatch import Mismatch, MismatchBounds, measured_bounds
from configs.model import Export, Lora, Model
from configs.plan import Plan, chip_problems, rollout_weights_problems
from configs.rollout import (
    Rollout,
    ahead_problems,
    partial_problems,
    shrink_problems,
)
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
    "parse_duration_s",
]


_LONG_ROW = 2048
"""Tokens of a packed row that holds all or most of a group; longer ones save little."""


class Run(Table):
    """Name, folder, seed and phases of the run."""

    name: Slug = Field(
        # File systems limit folder names to 255 bytes.
        max_length=200,
        description="name of the run; its folder is DIR/NAME",
    )
    dir: OutputPath = Field(
        "runs",
        validate_default=True,
        description="parent folder of the run folders",
        json_schema_extra=FREE,
    )
    mirror: MirrorURL | None = Field(
        None,
        description="where the run folder is copied in the background, as MIRROR/NAME: a URL such "
        "as s3://bucket/runs, gs://bucket/runs or hf://buckets/user/name, or an existing folder on "
        "another disk; a host without the run folder resumes from there; keys and passwords are "
        "read from the environment",
        json_schema_extra=FREE,
    )
    tpu_chips: int | None = Field(
        None,
        ge=1,
        description="number of TPU chips of this host, where Ray's count of its device files is "
        "wrong; for a private cluster",
        json_schema_extra=FREE,
    )
    fork: FolderPath | None = Field(
        None,
        description="RUN_DIR@STEP, RUN_DIR@best or RUN_DIR@last: begin from this checkpoint of "
        "another run, with its optimizer state; other settings may differ but for the base and the "
        "shape of the adapter",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**32,
        description="random seed of data order, adapter initialization and sampling",
    )
    phases: Annotated[tuple[Literal["sft", "grpo"], ...], Field(strict=False)] = Field(
        ("grpo",),
        description='training phases in order: ["grpo"], or with an SFT phase ["sft", "grpo"]',
    )

    def conflicts(self) -> Iterator[Problem]:
        """GRPO is the last phase; a fork names a step, and has the optimizer's state of GRPO."""
        if self.phases not in {("grpo",), ("sft", "grpo")}:
            yield "phases", 'nearest valid: ["grpo"] or ["sft", "grpo"]'
        if self.fork is not None and not VERSION.fullmatch(self.fork):
            yield "fork", 'must be RUN_DIR@STEP, such as "runs/a@40", RUN_DIR@best or RUN_DIR@last'
        elif self.fork is not None and self.has_sft_phase:
            yield "fork", 'goes with phases = ["grpo"] only'

    @property
    def has_sft_phase(self) -> bool:
        """Whether an SFT phase precedes GRPO."""
        return "sft" in self.phases


class Checkpoint(Table):
    """Checkpoints of the learner's state."""

    model_config = ConfigDict(json_schema_extra=FREE)

    every_steps: int = Field(10, ge=1, description="most steps between two checkpoints")
    every_s: float = Field(
        120.0,
        gt=0,
        description="seconds after which a checkpoint is written though fewer steps are done: a "
        "death costs at most so much work, and a step",
    )
    keep: int = Field(
        2,
        ge=1,
        description="number of newest checkpoints to keep, besides that of the best version; older "
        "ones are deleted",
    )
    keep_every: int | None = Field(
        None, ge=1, description="also keep checkpoints of steps that are multiples of this number"
    )


class Records(Table):
    """Additional records in the run folder."""

    model_config = ConfigDict(json_schema_extra=FREE)

    tokens: bool = Field(False, description="also write token ids and log-probs of every rollout")


_STEP_RANGE = re.compile(r"(?P<first>[1-9]\d*)(-(?P<last>[1-9]\d*))?", re.ASCII)


class Profile(Table):
    """Profiles of training steps in the folder `profile/` of the run."""

    model_config = ConfigDict(json_schema_extra=FREE)

    steps: Text | None = Field(
        None,
        description="training steps to profile, counted from 1, e.g. 3-5: learner and samplers "
        "write JAX profiler traces",
    )

    def conflicts(self) -> Iterator[Problem]:
        """The steps are a step or two, ascending."""
        if self.steps is None:
            return
        found = _STEP_RANGE.fullmatch(self.steps)
        if found is None:
            yield "steps", 'must be a step or two, counted from 1; nearest valid: "3-5"'
        elif int(found["last"] or found["first"]) < int(found["first"]):
            yield "steps", f'must ascend; nearest valid: "{found["last"]}-{found["first"]}"'

    @property
    def range(self) -> tuple[int, int] | None:
        """The first and the last step; None: no profile."""
        found = None if self.steps is None else _STEP_RANGE.fullmatch(self.steps)
        return (
            None if found is None else (int(found["first"]), int(found["last"] or found["first"]))
        )


class Faults(Table):
    """Restarts of a run whose process, or one of its processes, dies or hangs."""

    model_config = ConfigDict(json_schema_extra=FREE)

    restarts: int = Field(
        3,
        ge=0,
        description="restarts of the run without a new training step in between; one more death or "
        "hang ends it",
    )
    stuck_s: float | None = Field(
        None,
        ge=5.0,
        description="seconds without progress (a step, a segment, a micro-batch, a call of a "
        "reward) after which the run is ended and started again; at least 1800 while it loads, "
        "compiles or writes files. Default: the largest of 300, ten times the longest step and "
        "twice the time limit of a reward",
    )


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
    plan: Plan
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

    def conflicts(self) -> Iterator[Problem]:
        """The tables suit each other; see `cross_problems`."""
        yield from cross_problems(dict(self))

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
        return default_metric(self.eval, self.rewards)

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
    def reward_weights(self) -> dict[str, float]:
        """The weight of each part of the reward, that of `rollout.overlong_tokens` included."""
        return reward_weights(self.rewards, self.rollout)

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
        return _shares_prefix(self.rollout, self.learner)

    @property
    def row_tokens(self) -> int:
        """Tokens of a packed row."""
        return self.plan.row_tokens or _default_row(self.rollout, self.learner)

    @property
    def slots(self) -> int:
        """Slots of a sampler; available after planning."""
        return self.plan.slot_ladder[0]

    @property
    def micro_batch_rows(self) -> int:
        """Packed rows of a micro-batch over all learner devices; available after planning."""
        assert self.plan.micro_batch_tokens is not None, "sizes are not planned yet"
        return self.plan.micro_batch_tokens // self.row_tokens


def cross_problems(tables: Mapping[str, Table]) -> Iterator[Problem]:
    """Yields problems between tables that are valid individually.

    Args:
        tables: valid tables by name. Checks of an absent table or setting are skipped, so that one
            mistake does not hide others.
    """
    for names, check in _CROSS_CHECKS:
        with suppress(KeyError, AttributeError):
            yield from check(*(tables[name] for name in names))


def _schedule_problems(learner: Learner, budget: Budget, run: Run, sft: Sft) -> Iterator[Problem]:
    end = learner.decay_steps
    if end is None and budget.steps is not None:
        end = budget.steps - (sft.steps if run.has_sft_phase else 0)
    if learner.schedule == "constant":
        for key, what in learner.unused("decay_steps", why="with a constant schedule"):
            yield f"learner.{key}", what
    elif end is not None and learner.warmup_steps >= end:
        what = f"must be below the end of the decay, step {end}; nearest valid: {end - 1}"
        yield "learner.warmup_steps", what


def _bucket_problems(plan: Plan, rollout: Rollout) -> Iterator[Problem]:
    longest = rollout.max_prompt_tokens
    valid = sorted({size for size in plan.prompt_buckets if size < longest})
    if valid != list(plan.prompt_buckets):
        what = f"must be ascending and below {longest}, which is always a bucket"
        yield "plan.prompt_buckets", f"{what}; nearest valid: {valid}"


def _shares_prefix(rollout: Rollout, learner: Learner) -> bool:
    """See `Config.shares_prefix`."""
    if learner.share_prefix is not None:
        return learner.share_prefix
    saved = rollout.expected_prompt * (1 - 1 / rollout.group_size)
    return saved >= 0.1 * (rollout.expected_prompt + rollout.expected_completion)


def _default_row(rollout: Rollout, learner: Learner) -> int:
    """The longest sequence, or a group of expected lengths that shares its prompt, if longer."""
    longest = rollout.max_tokens
    if not _shares_prefix(rollout, learner):
        return longest
    group = rollout.expected_prompt + rollout.group_size * rollout.expected_completion
    return max(longest, min(_LONG_ROW, math.ceil(group)))


def _row_problems(plan: Plan, rollout: Rollout, learner: Learner) -> Iterator[Problem]:
    longest = rollout.max_tokens
    if plan.row_tokens is not None and plan.row_tokens < longest:
        what = f"must hold the longest sequence, {longest} tokens; nearest valid: {longest}"
        yield "plan.row_tokens", what
        return
    row, tokens = plan.row_tokens or _default_row(rollout, learner), plan.micro_batch_tokens
    if tokens is not None and tokens % (row * plan.learner_shards):
        nearest = nearest_multiples(tokens, row * plan.learner_shards)
        what = (
            f"must be a multiple of plan.row_tokens = {row} x {plan.learner_shards} rows, one for "
            f"each device or group of tp devices; nearest valid: {nearest}"
        )
        yield "plan.micro_batch_tokens", what


def _overlong_problems(rewards: Rewards, rollout: Rollout) -> Iterator[Problem]:
    if rollout.overlong_tokens and OVERLONG in [part.name for part in rewards.functions]:
        what = f"{OVERLONG!r} is the name of the part of rollout.overlong_tokens; choose another"
        yield "rewards.functions", what


def reward_weights(rewards: Rewards, rollout: Rollout) -> dict[str, float]:
    """See `Config.reward_weights`."""
    overlong = {OVERLONG: 1.0} if rollout.overlong_tokens else {}
    return {part.name: part.weight for part in rewards.functions} | overlong


def _alarm_problems(
    alarms: Alarms, evaluation: Eval, learner: Learner, rewards: Rewards, rollout: Rollout
) -> Iterator[Problem]:
    weighted = [weight for weight in reward_weights(rewards, rollout).values() if weight]
    if not evaluation.validates:
        why = "without eval.every_steps or eval.every_minutes"
        for name in ("validation_falls", "rising_while_validation_falls"):
            yield from _unused_rule(name, alarms.rule(name), why=why)
    if len(weighted) < 2:
        why = "with less than two weighted rewards"
        yield from _unused_rule("dominating", alarms.dominating, why=why)
    if learner.kl_coef == 0:
        why = "with learner.kl_coef = 0, where there is no reference to compare with"
        yield from _unused_rule("kl", alarms.kl, why=why)


def _unused_rule(name: str, rule: AlarmRule, *, why: str) -> Iterator[Problem]:
    for key, what in rule.unused(*type(rule).model_fields, why=why):
        yield f"alarms.{name}.{key}", what


def _validation_problems(evaluation: Eval, data: Data) -> Iterator[Problem]:
    if evaluation.validates and data.validation is None:
        key = "every_steps" if evaluation.every_steps else "every_minutes"
        yield f"eval.{key}", "needs data.validation; set it, or remove this"
    if data.validation is not None and not evaluation.validates:
        what = "has no effect without eval.every_steps or eval.every_minutes; set one of them"
        yield "data.validation", what


def _profile_problems(profile: Profile, budget: Budget) -> Iterator[Problem]:
    if profile.range is not None and budget.steps is not None:
        first, _ = profile.range
        if first > budget.steps:
            what = f"there are only budget.steps = {budget.steps} steps; nearest valid: "
            yield "profile.steps", f'{what}"{budget.steps}"'


def _sft_problems(run: Run, sft: Sft, budget: Budget) -> Iterator[Problem]:
    if not run.has_sft_phase:
        for key, what in sft.unused(*Sft.model_fields, why='without "sft" in run.phases'):
            yield f"sft.{key}", what
        return
    if sft.train is None:
        yield "sft.train", 'is required for run.phases = ["sft", "grpo"]'
    if budget.steps is not None and sft.steps >= budget.steps:
        what = f"must be below budget.steps = {budget.steps}, to leave steps for GRPO"
        yield "sft.steps", f"{what}; nearest valid: {budget.steps - 1}"


_CROSS_CHECKS: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Problem]]], ...] = (
    (("learner", "budget", "run", "sft"), _schedule_problems),
    (("plan", "rollout"), _bucket_problems),
    (("plan", "rollout", "learner"), _row_problems),
    (("plan", "model", "learner"), rollout_weights_problems),
    (("rewards", "rollout"), _overlong_problems),
    (("rollout", "learner", "plan"), partial_problems),
    (("rollout", "learner", "plan"), ahead_problems),
    (("rollout", "budget"), shrink_problems),
    (("eval", "data"), _validation_problems),
    (("alarms", "eval", "learner", "rewards", "rollout"), _alarm_problems),
    (("eval", "rewards", "rollout"), metric_problems),
    (("plan", "run"), chip_problems),
    (("run", "sft", "budget"), _sft_problems),
    (("profile", "budget"), _profile_problems),
)
