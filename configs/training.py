"""The settings that say how it is trained: the warm start, the rollouts, the update."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.base import Strings, Table, Text, refuse
from configs.task import Source


class Sft(Table):
    """The warm start: worked examples, learned with a loss on their completions only."""

    train: Source | None = Field(
        None, description="rows with the columns of prompt.template and a completion"
    )
    completion_column: Text = Field("completion", description="column with what the model writes")
    steps: int = Field(100, ge=1, description="optimizer updates; they count as steps of the run")
    sequences_per_step: int = Field(
        64, ge=1, description="sequences of packed examples in an update"
    )
    lr: float = Field(1e-4, gt=0, description="peak learning rate of this phase")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="how the learning rate decays to zero over the phase"
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")

    @model_validator(mode="after")
    def _decays(self) -> Sft:
        if self.warmup_steps >= self.steps:
            what = f"must end before the phase does; nearest valid: {self.steps - 1}"
            refuse([("warmup_steps", what)])
        return self


class Rollout(Table):
    """How rollouts are drawn."""

    group_size: int = Field(8, ge=2, description="rollouts per prompt (the group of GRPO)")
    prompts_per_step: int = Field(ge=1, description="prompts in a step")
    max_prompt_tokens: int = Field(ge=1, description="longer prompts are left out and counted")
    max_new_tokens: int = Field(ge=1, description="a completion ends here at the latest")
    temperature: float = Field(1.0, gt=0, description="of the sampled and of the learned policy")
    top_k: int = Field(0, ge=0, description="draw among the k likeliest tokens; 0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="draw among the nucleus of mass p; 1: off")
    stop_tokens: Strings = Field(
        ("<end_of_turn>", "<eos>"), description="tokens that end a completion and are learned"
    )
    forbidden_tokens: Strings = Field(
        ("<pad>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"),
        description="tokens that the policy may never draw",
    )

    @model_validator(mode="after")
    def _tokens(self) -> Rollout:
        both = sorted(set(self.stop_tokens) & set(self.forbidden_tokens))
        if not self.stop_tokens:
            refuse([("stop_tokens", "no completion could ever end; name at least one token")])
        if both:
            refuse([("forbidden_tokens", f"{', '.join(both)}: stop tokens, so they must be drawn")])
        return self

    @property
    def size(self) -> int:
        """Rollouts in a step."""
        return self.group_size * self.prompts_per_step

    @property
    def max_tokens(self) -> int:
        """Longest sequence: a prompt and its completion."""
        return self.max_prompt_tokens + self.max_new_tokens


class Learner(Table):
    """The GRPO update (arXiv:2402.03300)."""

    lr: float = Field(1e-5, gt=0, description="peak learning rate of AdamW")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate decays to zero after the warm-up"
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    decay_steps: int | None = Field(
        None, ge=1, description="step at which the decay ends; default: budget.steps"
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of the adapter")
    adam_b1: float = Field(0.9, ge=0, lt=1, description="Adam's first-moment decay")
    adam_b2: float = Field(0.99, ge=0, lt=1, description="Adam's second-moment decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    updates_per_batch: int = Field(1, ge=1, description="optimizer updates on each step's rollouts")
    clip_epsilon: float = Field(0.2, gt=0, lt=1, description="half-width of the ratio's clip range")
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="weight of KL(policy || policy as GRPO began), estimator k3; 0: none",
    )
    advantage: Literal["grpo", "dr_grpo"] = Field(
        "grpo", description="grpo: divided by the group's deviation; dr_grpo: centred only"
    )
    token_weights: Literal["sequence", "token"] = Field(
        "token",
        description="sequence: mean over each rollout first; token: over all tokens at once",
    )
