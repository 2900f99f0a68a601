"""Settings of the updates: the GRPO loss and its regularization, the optimizer, the SFT phase."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from configs.base import ACCEPTED, NO_PROGRAM, FolderPath, Problem, Table, Text
from configs.task import Source

Advantage = Literal["grpo", "dr_grpo", "rloo"]
TokenWeights = Literal["sequence", "token", "constant"]
Loss = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]


@dataclass(frozen=True)
class Variant:
    """Policy loss of a published algorithm.

    Attributes:
        clip_low: the probability ratio is clipped below at 1 - clip_low.
        clip_high: the probability ratio is clipped above at 1 + clip_high; None: clip_low.
        advantage: how rewards become advantages.
        token_weights: how token losses are averaged.
    """

    clip_low: float
    clip_high: float | None
    advantage: Advantage
    token_weights: TokenWeights


VARIANTS: dict[Loss, Variant] = {
    # the original: arXiv:2402.03300
    "grpo": Variant(0.2, None, "grpo", "sequence"),
    # arXiv:2503.20783: no division by standard deviation or length
    "dr_grpo": Variant(0.2, None, "dr_grpo", "constant"),
    # arXiv:2503.14476: clip-higher, token-level loss
    "dapo": Variant(0.2, 0.28, "grpo", "token"),
    # arXiv:2507.18071, 5.1: clip range of sequence-level ratios
    "gspo": Variant(3e-4, 4e-4, "grpo", "sequence"),
    # arXiv:2506.13585: no lower bound; upper bound of arXiv:2510.13786, a weight of 5
    "cispo": Variant(1.0, 4.0, "grpo", "token"),
}


class Learner(Table):
    """The GRPO update (arXiv:2402.03300) and its variants."""

    lr: float = Field(
        5e-5,
        gt=0,
        le=10,
        description="peak learning rate of AdamW",
        json_schema_extra=ACCEPTED | NO_PROGRAM,
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="decay of the learning rate to zero after the warm-up",
        json_schema_extra=NO_PROGRAM,
    )
    warmup_steps: int = Field(
        0, ge=0, description="steps of linear warm-up", json_schema_extra=NO_PROGRAM
    )
    decay_steps: int | None = Field(
        None,
        ge=1,
        description="step at which the decay ends; default: budget.steps, or with a time budget "
        "the estimated last step, updated as steps are timed",
        json_schema_extra=NO_PROGRAM,
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of the adapter")
    adam_b2: float = Field(0.99, ge=0, lt=1, description="AdamW beta2: second-moment decay")
    max_grad_norm: float = Field(
        1.0, gt=0, description="global norm to which gradients are clipped"
    )
    updates_per_batch: int = Field(1, ge=1, description="optimizer updates on each step's rollouts")

    share_prefix: bool | None = Field(
        None,
        description="compute a prompt once for all rollouts of its group that are in one row, in "
        "gradient, scoring and reference: the same log-probs and gradients from fewer positions; "
        "default: true if at the expected lengths it saves at least a tenth of them",
    )

    loss: Loss = Field(
        "grpo",
        description="policy loss. grpo, dr_grpo: clipped token-level ratio; dapo: with a higher "
        "upper clip bound; gspo: clipped sequence-level ratio; cispo: clipped importance weight "
        "times log-prob. Sets the defaults of the four keys below",
    )
    clip_epsilon: float | None = Field(
        None,
        gt=0,
        le=1,
        description="lower clip range: the ratio is clipped at 1 - clip_epsilon; default: 0.2, "
        "gspo: 3e-4, cispo: 1 (no clipping)",
    )
    clip_epsilon_high: float | None = Field(
        None,
        gt=0,
        description="upper clip range: the ratio is clipped at 1 + clip_epsilon_high; default: "
        "clip_epsilon, dapo: 0.28, gspo: 4e-4, cispo: 4",
    )
    advantage: Advantage | None = Field(
        None,
        description="advantage of a rollout. grpo: reward minus the group's mean, divided by its "
        "standard deviation; dr_grpo: minus the group's mean; rloo: minus the mean of the group's "
        'other rollouts; default: grpo, dr_grpo with loss = "dr_grpo"',
    )
    token_weights: TokenWeights | None = Field(
        None,
        description="how token losses are averaged. sequence: mean per rollout, then over "
        "rollouts; token: mean over all tokens; constant: sum divided by rollouts x "
        "max_new_tokens; default: sequence for grpo and gspo, token for dapo and cispo, constant "
        "for dr_grpo",
    )
    importance_cap: float = Field(
        0.0,
        ge=0,
        description="truncated importance sampling: upper bound of the learner-to-sampler "
        "probability ratio that weights the policy loss; accounts for top_k, top_p and min_p; "
        "0: off",
    )
    overlong: Literal["learn", "mask"] = Field(
        "learn",
        description="rollouts truncated by length: learn: trained on like others; mask: loss "
        "weight 0",
    )

    kl_coef: float = Field(
        0.0,
        ge=0,
        description="coefficient of KL(policy || reference), where the reference is the policy at "
        "the start of GRPO; 0: off",
        json_schema_extra=ACCEPTED,
    )
    kl: Literal["k1", "k2", "k3", "topk"] = Field(
        "k3",
        description="estimator of that KL. k1, k2, k3: from the sampled token; topk: from the "
        "reference's top-k tokens and one bucket for all other tokens",
    )
    teacher: FolderPath | None = Field(
        None,
        description="adapter of a frozen teacher for distillation, on the same base with this "
        "run's rank, scale and targets: a PEFT folder, a run folder or an export",
    )
    distill_coef: float = Field(
        0.0,
        ge=0,
        description="coefficient of KL(teacher || policy) over the teacher's top-k tokens; 0: off",
    )
    kl_top_k: int = Field(
        64, ge=1, le=256, description="k of the reference's and the teacher's top-k tokens"
    )

    def conflicts(self) -> Iterator[Problem]:
        """Every setting has an effect."""
        if self.updates_per_batch == 1:
            why = "with learner.updates_per_batch = 1, where the ratio is 1"
            yield from self.unused("clip_epsilon", "clip_epsilon_high", why=why)
        if self.kl_coef == 0:
            yield from self.unused("kl", why="with learner.kl_coef = 0")
        if self.teacher is not None and self.distill_coef == 0:
            yield "teacher", "has no effect with learner.distill_coef = 0; set that, or remove this"
        if self.teacher is None and self.distill_coef > 0:
            yield "distill_coef", "needs learner.teacher; set that, or remove this"
        if not self.uses_reference_top_k:
            why = 'without learner.kl = "topk" or learner.teacher'
            yield from self.unused("kl_top_k", why=why)

    @property
    def uses_reference_top_k(self) -> bool:
        """Whether the reference's or teacher's top-k log-probs are stored for each token."""
        return (self.kl == "topk" and self.kl_coef > 0) or self.teacher is not None

    @property
    def variant(self) -> Variant:
        """The loss with configured values in place of the published ones; `clip_high` is set."""
        found = VARIANTS[self.loss]
        low = found.clip_low if self.clip_epsilon is None else self.clip_epsilon
        high = low if found.clip_high is None else found.clip_high
        return replace(
            found,
            clip_low=low,
            clip_high=high if self.clip_epsilon_high is None else self.clip_epsilon_high,
            advantage=self.advantage or found.advantage,
            token_weights=self.token_weights or found.token_weights,
        )


class Sft(Table):
    """The SFT phase: supervised fine-tuning on demonstrations, with a loss on completions only."""

    train: Source | None = Field(
        None,
        description="demonstrations: rows with the columns of prompt.template and a completion",
    )
    completion_column: Text = Field("completion", description="column with the completion")
    steps: int = Field(100, ge=1, description="optimizer updates; they count as steps of the run")
    sequences_per_step: int = Field(
        64, ge=1, description="packed rows of demonstrations in an update"
    )
    lr: float = Field(1e-4, gt=0, le=10, description="peak learning rate of the SFT phase")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="decay of the learning rate to zero over the SFT phase"
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")

    def conflicts(self) -> Iterator[Problem]:
        """The warm-up is a part of the phase."""
        if self.warmup_steps >= self.steps:
            what = f"must end before the phase does; nearest valid: {self.steps - 1}"
            yield "warmup_steps", what
