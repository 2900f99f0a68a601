"""The settings that say what it is trained on: worked examples, rollouts."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from configs.base import Problem, Strings, Table, Text, refuse
from configs.budget import Budget
from configs.learner import Learner
from configs.plan import Plan
from configs.task import Source


def enough(rollouts: int, *, cut_off: float) -> int:
    """Of so many that a sampler is asked for, how many have to end: this share, rounded up."""
    # Not one more because of a float's last bit.
    return math.ceil(round(cut_off * rollouts, 6))


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
    min_prompts_per_step: int | None = Field(
        None,
        ge=1,
        description="a step that would not fit into a budget of time any more may be made smaller, "
        "to so many prompts at the least; default: prompts_per_step, never",
    )
    max_prompt_tokens: int = Field(ge=1, description="longer prompts are left out and counted")
    max_new_tokens: int = Field(ge=1, description="a completion ends here at the latest")
    temperature: float = Field(1.0, gt=0, description="of the sampled and of the learned policy")
    top_k: int = Field(0, ge=0, description="draw among the k likeliest tokens; 0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="draw among the nucleus of mass p; 1: off")
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="draw among tokens at least p times as likely as the likeliest; 0: off",
    )
    overlong_tokens: int = Field(
        0,
        ge=0,
        description="soft overlong punishment (DAPO): over so many last tokens of max_new_tokens "
        'the reward falls linearly by 1; a part of its own, "overlong"; 0: off',
    )
    partial: Literal["off", "keep", "drop"] = Field(
        "off",
        description="rollouts that have not ended when enough of a step's have, see cut_off: off: "
        "all are waited for; keep: the next step goes on with them under its version; drop: their "
        "groups are learned from without them, which favours what is short",
    )
    cut_off: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="a sampler's part of a step is over when this share of the rollouts that it "
        "was asked for has ended; needed with partial",
    )
    stop_tokens: Strings = Field(
        ("<end_of_turn>", "<eos>"), description="tokens that end a completion and are learned"
    )
    stop_strings: Strings = Field(
        (),
        description="texts that end a completion, too, where they have been drawn; the token that "
        'completes one is the last, and the text includes it, as in "</answer>"',
    )
    forbidden_tokens: Strings = Field(
        ("<pad>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"),
        description="tokens that the policy may never draw",
    )

    @model_validator(mode="after")
    def _tokens(self) -> Rollout:
        both = sorted(set(self.stop_tokens) & set(self.forbidden_tokens))
        problems: list[Problem] = []
        if not self.stop_tokens:
            what = "no completion could ever end; name at least one token"
            problems.append(("stop_tokens", what))
        if "" in self.stop_strings:
            problems.append(("stop_strings", "one is empty; every completion would end at once"))
        if any("\ufffd" in string for string in self.stop_strings):
            what = "one holds U+FFFD, which stands for what is no text; remove it"
            problems.append(("stop_strings", what))
        if both:
            what = f"{', '.join(both)}: stop tokens, so they must be drawn"
            problems.append(("forbidden_tokens", what))
        if self.partial == "off" and self.cut_off is not None:
            what = 'means nothing with rollout.partial = "off"; remove it, or set that to "keep"'
            problems.append(("cut_off", what))
        if self.partial != "off" and self.cut_off is None:
            problems.append(("partial", "needs rollout.cut_off, e.g. 0.9; set that"))
        if (self.min_prompts_per_step or 1) > self.prompts_per_step:
            what = f"may be at most prompts_per_step; nearest valid: {self.prompts_per_step}"
            problems.append(("min_prompts_per_step", what))
        if self.overlong_tokens > self.max_new_tokens:
            what = f"may be at most max_new_tokens; nearest valid: {self.max_new_tokens}"
            problems.append(("overlong_tokens", what))
        refuse(problems)
        return self

    @property
    def truncates(self) -> bool:
        """Whether the unlikeliest tokens are never drawn, though they are not forbidden."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def size(self) -> int:
        """Rollouts in a step."""
        return self.group_size * self.prompts_per_step

    @property
    def fewest_prompts(self) -> int:
        """Prompts of the smallest step."""
        return self.min_prompts_per_step or self.prompts_per_step

    @property
    def read_tokens(self) -> tuple[int, ...]:
        """Lengths of what may be read before anything is drawn, the longest of each kind.

        A prompt; where rollouts that were cut are kept, also a prompt with half of a completion or
        with all of it but a token.
        """
        if self.partial != "keep":
            return (self.max_prompt_tokens,)
        whole, half = self.max_tokens, self.max_prompt_tokens + self.max_new_tokens // 2
        return tuple(sorted({self.max_prompt_tokens, half, whole}))

    @property
    def max_tokens(self) -> int:
        """Longest sequence: a prompt and its completion."""
        return self.max_prompt_tokens + self.max_new_tokens


def partial_problems(rollout: Rollout, learner: Learner, plan: Plan) -> list[Problem]:
    """What `rollout.partial` and its cut-off need of the other tables."""
    if rollout.cut_off is not None:
        share = -(-rollout.prompts_per_step // plan.num_samplers) * rollout.group_size
        if enough(share, cut_off=rollout.cut_off) == share:
            what = f"of a sampler's {share} rollouts in a step none could be cut"
            nearest = math.floor(100 * (share - 1) / share) / 100
            return [("rollout.cut_off", f"{what}; nearest valid: {nearest}")]
    if rollout.partial == "keep" and not learner.importance_cap:
        what = (
            '"keep" lets older versions draw part of what is learned from, and only importance '
            "weights correct for that; needs learner.importance_cap above 0, e.g. 2"
        )
        return [("rollout.partial", what)]
    return []


def shrink_problems(rollout: Rollout, budget: Budget) -> list[Problem]:
    """Only a clock makes steps smaller."""
    if rollout.min_prompts_per_step is None or budget.steps is None:
        return []
    what = "means nothing with budget.steps, where all steps are alike; remove it"
    return [("rollout.min_prompts_per_step", what)]
