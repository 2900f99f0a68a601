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


def min_finished(rollouts: int, *, cut_off: float) -> int:
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

    group_size: int = Field(8, ge=2, le=1024, description="rollouts per prompt (the group of GRPO)")
    prompts_per_step: int = Field(ge=1, le=16_384, description="prompts in a step")
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
    dynamic_sampling: Literal["off", "capped", "adaptive"] = Field(
        "off",
        description="groups whose rewards are all equal teach nothing: capped: further prompts are "
        "drawn until prompts_per_step groups have signal or max_prompts_per_step are drawn; "
        "adaptive: only while that gains more groups with signal a second than the next step would "
        "(DAPO, arXiv:2503.14476)",
    )
    max_prompts_per_step: int | None = Field(
        None, ge=1, description="most prompts that a step draws; needed with dynamic_sampling"
    )
    ahead: Literal["off", "one"] = Field(
        "off",
        description="one: while the learner learns from a step's rollouts the samplers draw the "
        "next step's, so all but the first step's are one version behind; split placement only",
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
        refuse([*problems, *self._dynamic_problems()])
        return self

    def _dynamic_problems(self) -> list[Problem]:
        most, mode = self.max_prompts_per_step, self.dynamic_sampling
        if mode == "off":
            what = 'means nothing with rollout.dynamic_sampling = "off"; remove it, or set that'
            return [] if most is None else [("max_prompts_per_step", what)]
        problems: list[Problem] = []
        wanted, key = self.prompts_per_step, "dynamic_sampling"
        if most is None:
            what = f"needs rollout.max_prompts_per_step, e.g. {3 * wanted}; set that"
            problems.append((key, what))
        elif most <= wanted:
            what = f"must be above prompts_per_step; nearest valid: {wanted + 1}"
            problems.append(("max_prompts_per_step", what))
        if self.partial != "off":
            what = (
                f'"{mode}" has to know all rewards of a group before the step is over, and '
                f'rollout.partial = "{self.partial}" ends steps without them; nearest valid: "off"'
            )
            problems.append((key, what))
        if mode == "adaptive" and self.ahead != "off":
            what = (
                '"adaptive" weighs seconds of sampling against seconds of learning, which with '
                f'rollout.ahead = "{self.ahead}" are the same ones; nearest valid: "capped"'
            )
            problems.append((key, what))
        return problems

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
        if min_finished(share, cut_off=rollout.cut_off) == share:
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


def dynamic_problems(rollout: Rollout, plan: Plan) -> list[Problem]:
    """What `rollout.dynamic_sampling` needs of the plan."""
    if rollout.dynamic_sampling == "adaptive" and plan.fixed:
        what = (
            '"adaptive" decides by measured seconds, and plan.fixed = true takes no decision from '
            'the clock; nearest valid: "capped", or plan.fixed = false'
        )
        return [("rollout.dynamic_sampling", what)]
    return []


def ahead_problems(rollout: Rollout, learner: Learner, plan: Plan) -> list[Problem]:
    """What `rollout.ahead` needs of the other tables."""
    if rollout.ahead == "off":
        return []
    problems: list[Problem] = []
    if plan.placement == "colocated":
        what = (
            'needs plan.placement = "split": a process that owns all devices either samples or '
            'learns; nearest valid: "off"'
        )
        problems.append(("rollout.ahead", what))
    if not learner.importance_cap:
        what = (
            '"one" learns from what the version before drew, and only importance weights correct '
            "for that; needs learner.importance_cap above 0, e.g. 2"
        )
        problems.append(("rollout.ahead", what))
    return problems


def shrink_problems(rollout: Rollout, budget: Budget) -> list[Problem]:
    """Only a clock makes steps smaller, and only those that are drawn at once, when they begin."""
    if rollout.min_prompts_per_step is None:
        return []
    what = None
    if budget.steps is not None:
        what = "means nothing with budget.steps, where all steps are alike; remove it"
    elif rollout.dynamic_sampling != "off":
        what = 'needs rollout.dynamic_sampling = "off", which fills steps up; remove one of them'
    elif rollout.ahead != "off":
        what = 'needs rollout.ahead = "off": a step is drawn before its time is known; remove one'
    return [] if what is None else [("rollout.min_prompts_per_step", what)]
