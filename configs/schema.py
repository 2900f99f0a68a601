"""Every setting of a run: what it means, what it may be, and what it defaults to.

Light by design: nothing here imports more than pydantic, so `--help` and `--dry-run` are instant.
Numbers that follow from other numbers are properties, never fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.base import (
    LocalPath,
    Problem,
    Slug,
    Table,
    Text,
    nearest_multiples,
    parse_duration_s,
    refuse,
)
from configs.budget import Budget
from configs.learner import Learner
from configs.model import Export, Lora, Model
from configs.plan import Plan, rollout_weights_problems
from configs.task import (
    OVERLONG,
    Data,
    Mixed,
    NamedSource,
    Prompt,
    RewardFunction,
    Rewards,
    Shot,
    Source,
    repeated_names,
)
from configs.training import (
    Rollout,
    Sft,
    ahead_problems,
    dynamic_problems,
    partial_problems,
    shrink_problems,
)

__all__ = [
    "Budget",
    "Checkpoint",
    "Config",
    "Data",
    "Eval",
    "Export",
    "Learner",
    "Lora",
    "Mixed",
    "Model",
    "NamedSource",
    "Parity",
    "Plan",
    "Prompt",
    "Records",
    "RewardFunction",
    "Rewards",
    "Rollout",
    "Run",
    "Sft",
    "Shot",
    "Source",
    "Table",
    "Wandb",
    "cross_problems",
    "parse_duration_s",
]


class Run(Table):
    """Where the run lives and which random numbers it draws."""

    name: Slug = Field(
        # Of a folder's name file systems take 255 bytes, and rehearsals put something before it.
        max_length=200,
        description="name of the run; its folder is DIR/NAME",
    )
    dir: LocalPath = Field("runs", description="folder that holds the run folders")
    seed: int = Field(0, ge=0, lt=2**32, description="seeds data order, adapter and sampling noise")
    phases: Annotated[tuple[Literal["sft", "grpo"], ...], Field(strict=False)] = Field(
        ("grpo",), description='what is done, in order: ["grpo"], or a warm start: ["sft", "grpo"]'
    )

    @model_validator(mode="after")
    def _in_order(self) -> Run:
        if self.phases not in {("grpo",), ("sft", "grpo")}:
            refuse([("phases", 'nearest valid: ["grpo"] or ["sft", "grpo"]')])
        return self

    @property
    def warm_start(self) -> bool:
        """Whether a supervised phase comes first."""
        return "sft" in self.phases


class Eval(Table):
    """The protocol by which accuracy is measured, base and tuned alike."""

    temperature: float = Field(0.0, ge=0, description="0: greedy; else samples at this heat")
    samples: int = Field(1, ge=1, description="answers to each prompt, for pass@k and majority@k")
    extraction: Literal["tags", "last_number"] = Field(
        "tags",
        description="what counts as the answer: the last answer block, or the last number in the "
        "text, as published GSM8K figures often have it",
    )
    every_steps: int = Field(0, ge=0, description="steps between two validations; 0: not by steps")
    every_minutes: float | None = Field(
        None, gt=0, description="minutes between two validations; excludes every_steps"
    )
    sets: Annotated[tuple[NamedSource, ...], Field(strict=False)] = Field(
        (), description="more test sets, read once before and once after: what was forgotten?"
    )

    @model_validator(mode="after")
    def _protocol(self) -> Eval:
        problems: list[Problem] = []
        if self.samples > 1 and self.temperature == 0:
            what = "greedy answers are all alike; needs eval.temperature above 0; nearest valid: 1"
            problems.append(("samples", what))
        if self.every_steps and self.every_minutes is not None:
            what = "excludes eval.every_steps; remove one, e.g. with --eval.every_steps 0"
            problems.append(("every_minutes", what))
        reserved = ("train", "validation", "test", "probe")
        problems += repeated_names("sets", [*reserved, *(source.name for source in self.sets)])
        refuse(problems)
        return self

    @property
    def validates(self) -> bool:
        """Whether the validation split is read during training."""
        return bool(self.every_steps) or self.every_minutes is not None


class Checkpoint(Table):
    """When the learner's state is saved."""

    every_steps: int = Field(10, ge=1, description="steps between two checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints kept; older ones are deleted")


class Parity(Table):
    """Bounds on |log-prob of the sampler - log-prob of the learner| for the same token.

    The defaults of bf16 also hold for a float32 base under `model.quantization = "int8_matmul"` or
    `plan.kv_cache = "int8"`. Those of `plan.rollout_weights` are, in the order below, 0.5, 0.05,
    0.5 for merged with bf16; 0.75, 0.05, 0.5 for int8; and 1.0, 0.1, 1.25 for int8_matmul.
    """

    probe: float | None = Field(
        None,
        gt=0,
        description="largest difference allowed at start; default 1e-4 (float32), 0.25 (bf16)",
    )
    mean_stop: float | None = Field(
        None,
        gt=0,
        description="a step's mean above this ends the run; default 1e-4 (float32), 0.05 (bf16)",
    )
    p999_alarm: float | None = Field(
        None,
        gt=0,
        description="a step's 99.9th percentile above this is journaled; default 1e-3, 0.5",
    )


class Wandb(Table):
    """Weights & Biases."""

    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        "auto", description="auto: online when logged in, else offline; online: refuse otherwise"
    )
    project: str = Field("gemma-grpo", min_length=1, description="project")
    entity: Text | None = Field(None, description="team or user; default: yours")

    @model_validator(mode="after")
    def _used(self) -> Wandb:
        if self.mode == "disabled":
            what = 'means nothing with wandb.mode = "disabled"; remove it'
            default = {"project": "gemma-grpo", "entity": None}
            refuse([(key, what) for key in default if getattr(self, key) != default[key]])
        return self


class Records(Table):
    """What is written beside metrics and rollouts."""

    tokens: bool = Field(False, description="also write token ids and log-probs of every rollout")


class Config(Table):
    """A whole run."""

    run: Run = Field(description=Run.__doc__)
    model: Model = Field(description=Model.__doc__)
    lora: Lora = Field(Lora(), description=Lora.__doc__)
    sft: Sft = Field(Sft(), description=Sft.__doc__)
    data: Data = Field(description=Data.__doc__)
    prompt: Prompt = Field(Prompt(), description=Prompt.__doc__)
    rewards: Rewards = Field(description=Rewards.__doc__)
    rollout: Rollout = Field(description=Rollout.__doc__)
    learner: Learner = Field(Learner(), description=Learner.__doc__)
    plan: Plan = Field(description=Plan.__doc__)
    budget: Budget = Field(description=Budget.__doc__)
    eval: Eval = Field(Eval(), description=Eval.__doc__)
    export: Export = Field(Export(), description=Export.__doc__)
    checkpoint: Checkpoint = Field(Checkpoint(), description=Checkpoint.__doc__)
    parity: Parity = Field(Parity(), description=Parity.__doc__)
    wandb: Wandb = Field(Wandb(), description=Wandb.__doc__)
    records: Records = Field(Records(), description=Records.__doc__)

    @model_validator(mode="after")
    def _cross(self) -> Config:
        refuse(cross_problems(dict(self)))
        return self

    @property
    def sft_steps(self) -> int:
        """Steps of the supervised phase; the GRPO phase begins after them."""
        return self.sft.steps if self.run.warm_start else 0

    @property
    def decay_steps(self) -> int | None:
        """GRPO step at which the learning rate reaches zero, if that is known beforehand."""
        if self.learner.decay_steps is not None or self.budget.steps is None:
            return self.learner.decay_steps
        return self.budget.steps - self.sft_steps

    @property
    def plans_decay(self) -> bool:
        """Whether the end of the learning rate's decay follows the clock."""
        return self.learner.schedule != "constant" and self.decay_steps is None

    @property
    def prompt_buckets(self) -> tuple[int, ...]:
        """Lengths that have a compiled prefill, ascending."""
        return (*self.plan.prompt_buckets, *self.rollout.read_tokens)

    @property
    def segment_steps(self) -> int:
        """Decode steps between two looks by the host: no more than a rollout can take."""
        return min(self.plan.segment_steps, self.rollout.max_new_tokens)

    def prompt_bucket(self, tokens: int) -> int:
        """The smallest bucket that holds a prompt of so many tokens."""
        return min(size for size in self.prompt_buckets if size >= tokens)

    def prefill_rows(self, bucket: int) -> int:
        """Prompts of this bucket that each device of a sampler reads at a time."""
        slots = self.slots // self.plan.sampler_shards
        return max(1, min(slots, self.plan.prefill_tokens // bucket))

    @property
    def sampler_quantization(self) -> str:
        """How the matrices that samplers multiply with are kept: a `model.quantization`."""
        kind = self.plan.rollout_weights
        return kind if kind in {"int8", "int8_matmul"} else self.model.quantization

    @property
    def row_tokens(self) -> int:
        """Positions of a packed row."""
        return self.plan.row_tokens or self.rollout.max_tokens

    @property
    def slots(self) -> int:
        """Slots of a sampler, once there are sizes."""
        return self.plan.slot_ladder[0]

    @property
    def micro_batch_rows(self) -> int:
        """Packed rows in one gradient program, over all devices of the learner; likewise."""
        assert self.plan.micro_batch_tokens is not None, "sizes are planned first"
        return self.plan.micro_batch_tokens // self.row_tokens


def cross_problems(tables: Mapping[str, Table]) -> list[Problem]:
    """What is wrong between tables that are valid by themselves.

    Args:
        tables: valid tables by name; checks that need a table or a setting that is absent are left
            out, so that one mistake does not hide others.
    """
    problems: list[Problem] = []
    for names, check in _CROSS_CHECKS:
        with suppress(KeyError, AttributeError):
            problems += check(*(tables[name] for name in names))
    return problems


def _schedule_problems(learner: Learner, budget: Budget, run: Run, sft: Sft) -> list[Problem]:
    end = learner.decay_steps
    if end is None and budget.steps is not None:
        end = budget.steps - (sft.steps if run.warm_start else 0)
    if learner.schedule == "constant":
        if learner.decay_steps is not None:
            return [("learner.decay_steps", "means nothing with a constant schedule; remove it")]
    elif end is not None and learner.warmup_steps >= end:
        what = f"must end before the decay does, at step {end}; nearest valid: {end - 1}"
        return [("learner.warmup_steps", what)]
    return []


def _bucket_problems(plan: Plan, rollout: Rollout) -> list[Problem]:
    longest = rollout.max_prompt_tokens
    valid = sorted({size for size in plan.prompt_buckets if size < longest})
    if valid == list(plan.prompt_buckets):
        return []
    what = f"must rise and stay below {longest}, which is always a bucket"
    return [("plan.prompt_buckets", f"{what}; nearest valid: {valid}")]


def _row_problems(plan: Plan, rollout: Rollout) -> list[Problem]:
    longest = rollout.max_tokens
    if plan.row_tokens is not None and plan.row_tokens < longest:
        what = f"must hold the longest sequence, {longest} tokens; nearest valid: {longest}"
        return [("plan.row_tokens", what)]
    row, tokens = plan.row_tokens or longest, plan.micro_batch_tokens
    if tokens is not None and tokens % (row * plan.learner_shards):
        nearest = nearest_multiples(tokens, row * plan.learner_shards)
        what = (
            f"must be a multiple of plan.row_tokens = {row} x {plan.learner_shards} rows, one on "
            f"each device or group of tp devices; nearest valid: {nearest}"
        )
        return [("plan.micro_batch_tokens", what)]
    return []


def _overlong_problems(rewards: Rewards, rollout: Rollout) -> list[Problem]:
    names = [part.name for part in rewards.functions]
    if rollout.overlong_tokens and OVERLONG in names:
        what = f"{OVERLONG!r} is the name of rollout.overlong_tokens' part; choose another"
        return [("rewards.functions", what)]
    return []


def _validation_problems(evaluation: Eval, data: Data) -> list[Problem]:
    if evaluation.validates and data.validation is None:
        key = "every_steps" if evaluation.every_steps else "every_minutes"
        return [(f"eval.{key}", "needs data.validation; add it, or validate never")]
    if data.validation is not None and not evaluation.validates:
        what = "is read only when eval.every_steps or eval.every_minutes is set"
        return [("data.validation", what)]
    return []


def _sft_problems(run: Run, sft: Sft) -> list[Problem]:
    if run.warm_start:
        return [] if sft.train else [("sft.train", 'is needed for run.phases = ["sft", "grpo"]')]
    what = 'means nothing without "sft" in run.phases; remove it'
    default = Sft()
    changed = [key for key in Sft.model_fields if getattr(sft, key) != getattr(default, key)]
    return [(f"sft.{key}", what) for key in changed]


def _sft_budget_problems(run: Run, sft: Sft, budget: Budget) -> list[Problem]:
    if run.warm_start and budget.steps is not None and sft.steps >= budget.steps:
        what = f"must leave steps of budget.steps = {budget.steps} for GRPO"
        return [("sft.steps", f"{what}; nearest valid: {budget.steps - 1}")]
    return []


_CROSS_CHECKS: tuple[tuple[tuple[str, ...], Callable[..., list[Problem]]], ...] = (
    (("learner", "budget", "run", "sft"), _schedule_problems),
    (("plan", "rollout"), _bucket_problems),
    (("plan", "rollout"), _row_problems),
    (("plan", "model", "learner"), rollout_weights_problems),
    (("rewards", "rollout"), _overlong_problems),
    (("rollout", "learner", "plan"), partial_problems),
    (("rollout", "learner", "plan"), ahead_problems),
    (("rollout", "plan"), dynamic_problems),
    (("rollout", "budget"), shrink_problems),
    (("eval", "data"), _validation_problems),
    (("run", "sft"), _sft_problems),
    (("run", "sft", "budget"), _sft_budget_problems),
)
