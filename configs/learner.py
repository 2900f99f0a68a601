"""The settings of the update: which loss, what it pulls towards, how the optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field, model_validator

from configs.base import LocalPath, Problem, Table, refuse

Advantage = Literal["grpo", "dr_grpo", "rloo"]
TokenWeights = Literal["sequence", "token", "constant"]
Loss = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]


@dataclass(frozen=True)
class Variant:
    """What a published algorithm says about the policy's loss.

    Attributes:
        clip_low: the ratio is clipped at 1 - clip_low.
        clip_high: and at 1 + clip_high; None: as clip_low.
        advantage: how rewards become advantages.
        token_weights: how tokens are averaged.
    """

    clip_low: float
    clip_high: float | None
    advantage: Advantage
    token_weights: TokenWeights


VARIANTS: dict[Loss, Variant] = {
    # As in arXiv:2402.03300.
    "grpo": Variant(0.2, None, "grpo", "sequence"),
    # arXiv:2503.20783: neither the deviation nor the length divides
    "dr_grpo": Variant(0.2, None, "dr_grpo", "constant"),
    # arXiv:2503.14476: clip-higher, token-level loss
    "dapo": Variant(0.2, 0.28, "grpo", "token"),
    # arXiv:2507.18071, 5.1: ratios of whole sequences stay this close to 1
    "gspo": Variant(3e-4, 4e-4, "grpo", "sequence"),
    # arXiv:2506.13585: no lower bound; the upper one as in arXiv:2510.13786, a weight of 5
    "cispo": Variant(1.0, 4.0, "grpo", "token"),
}


class Learner(Table):
    """The GRPO update (arXiv:2402.03300) and its variants."""

    lr: float = Field(1e-5, gt=0, description="peak learning rate of AdamW")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate decays to zero after the warm-up"
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    decay_steps: int | None = Field(
        None,
        ge=1,
        description="step at which the decay ends; default: budget.steps, or with a budget of time "
        "the last step that fits into it, planned anew as steps turn out slower or faster",
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of the adapter")
    adam_b1: float = Field(0.9, ge=0, lt=1, description="Adam's first-moment decay")
    adam_b2: float = Field(0.99, ge=0, lt=1, description="Adam's second-moment decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    updates_per_batch: int = Field(1, ge=1, description="optimizer updates on each step's rollouts")

    loss: Loss = Field(
        "grpo",
        description="grpo, dr_grpo: clipped ratio of each token; dapo: clipped higher above; gspo: "
        "clipped ratio of each rollout; cispo: clipped weight times log-prob. It sets the defaults "
        "of the four keys below",
    )
    clip_epsilon: float | None = Field(
        None,
        gt=0,
        le=1,
        description="the ratio is clipped at 1 minus this; default: 0.2, gspo 3e-4, cispo 1 (not)",
    )
    clip_epsilon_high: float | None = Field(
        None,
        gt=0,
        description="and at 1 plus this; default: clip_epsilon, dapo 0.28, gspo 4e-4, cispo 4",
    )
    advantage: Advantage | None = Field(
        None,
        description="grpo: divided by the group's deviation; dr_grpo: centred only; rloo: against "
        "the mean of the others; default: grpo, with loss dr_grpo dr_grpo",
    )
    token_weights: TokenWeights | None = Field(
        None,
        description="sequence: mean over each rollout first; token: over all tokens at once; "
        "constant: sum divided by rollouts x max_new_tokens; default: sequence for grpo and gspo, "
        "token for dapo and cispo, constant for dr_grpo",
    )
    importance_cap: float = Field(
        0.0,
        ge=0,
        description="truncated importance sampling: the policy's loss is weighted by the "
        "probability ratio of learner to sampler, up to this, also where top_k, top_p or min_p "
        "truncate what it draws from; 0: off",
    )
    overlong: Literal["learn", "mask"] = Field(
        "learn", description="rollouts cut by length: learned like others, or without loss weight"
    )

    kl_coef: float = Field(
        0.0, ge=0, description="weight of KL(policy || policy as GRPO began); 0: none"
    )
    kl: Literal["k1", "k2", "k3", "topk"] = Field(
        "k3",
        description="estimator of that KL: k1, k2, k3 from the sampled token; topk from the "
        "reference's likeliest tokens and one bucket for all others",
    )
    teacher: LocalPath | None = Field(
        None,
        description="adapter of a frozen teacher on the same base, with this run's rank, scale and "
        "targets, to distil from: a PEFT folder, a run or an export",
    )
    distill_coef: float = Field(
        0.0, ge=0, description="weight of KL(teacher || policy) over the teacher's likeliest tokens"
    )
    kl_top_k: int = Field(
        128, ge=1, le=256, description="likeliest tokens kept of the reference's and the teacher's"
    )
    top_k_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type in which the log-probs of those tokens are kept; bfloat16 takes less "
        "memory and adds some 0.003 of noise to the KL of a token, which then is no bound",
    )

    @model_validator(mode="after")
    def _used(self) -> Learner:
        refuse([*self._clip_problems(), *self._signal_problems()])
        return self

    def _clip_problems(self) -> list[Problem]:
        if self.updates_per_batch > 1:
            return []
        what = "means nothing with learner.updates_per_batch = 1, where the ratio is 1; remove it"
        keys = ("clip_epsilon", "clip_epsilon_high")
        return [(key, what) for key in keys if getattr(self, key) is not None]

    def _signal_problems(self) -> list[Problem]:
        problems: list[Problem] = []
        if self.kl_coef == 0 and self.kl != "k3":
            problems.append(("kl", "means nothing with learner.kl_coef = 0; remove it"))
        if self.teacher is not None and self.distill_coef == 0:
            what = "means nothing with learner.distill_coef = 0; set that, or remove this"
            problems.append(("teacher", what))
        if self.teacher is None and self.distill_coef > 0:
            problems.append(("distill_coef", "needs learner.teacher; set that, or remove this"))
        if not self.uses_reference_top_k:
            what = 'means nothing without learner.kl = "topk" or learner.teacher; remove it'
            default = {"kl_top_k": 128, "top_k_dtype": "float32"}
            problems += [(key, what) for key in default if getattr(self, key) != default[key]]
        return problems

    @property
    def uses_reference_top_k(self) -> bool:
        """Whether the top of a distribution is kept for each token."""
        return (self.kl == "topk" and self.kl_coef > 0) or self.teacher is not None

    @property
    def variant(self) -> Variant:
        """The loss with what was set in place of its paper's values; `clip_high` is a number."""
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
