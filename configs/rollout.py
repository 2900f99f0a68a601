"""Settings of rollout generation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from configs.base import FREE, NO_PROGRAM, REWARDS, Problem, Strings, Table


def min_finished(rollouts: int, *, cut_off: float) -> int:
    """The share `cut_off` of a sampler's requested rollouts, which must finish; rounded up."""
    # The inner rounding keeps a float's last bit from adding one.
    return math.ceil(round(cut_off * rollouts, 6))


PROMPT_SHARE, COMPLETION_SHARE = 0.5, 0.35
"""Assumed mean lengths as shares of the longest; completions as in `launch.bench rollout`."""


class Rollout(Table):
    """Generation of rollouts."""

    group_size: int = Field(8, ge=2, le=1024, description="rollouts per prompt (the group of GRPO)")
    prompts_per_step: int = Field(
        16, ge=1, le=16_384, description="prompts in a step", json_schema_extra=NO_PROGRAM
    )
    min_prompts_per_step: int | None = Field(
        None,
        ge=1,
        description="minimum number of prompts to which the last steps may shrink to fit into a "
        "time budget; default: prompts_per_step (steps never shrink)",
        json_schema_extra=FREE | NO_PROGRAM,
    )
    max_prompt_tokens: int = Field(ge=1, description="longer prompts are excluded and counted")
    max_new_tokens: int = Field(ge=1, description="maximum length of a completion")
    temperature: float = Field(
        1.0, ge=0.01, le=100, description="temperature of sampler and learner"
    )
    top_k: int = Field(0, ge=0, description="sample from the k most likely tokens; 0: off")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the nucleus of probability mass p; 1: off"
    )
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="sample from tokens whose probability is at least p times that of the most "
        "likely one; 0: off",
    )
    overlong_tokens: int = Field(
        0,
        ge=0,
        description="soft overlong punishment (DAPO): over this many last tokens of max_new_tokens "
        'the reward falls linearly by 1; a separate part of the reward, "overlong"; 0: off',
        json_schema_extra=REWARDS | NO_PROGRAM,
    )
    partial: Literal["off", "keep", "drop"] = Field(
        "off",
        description="partial rollouts: what happens to unfinished rollouts once cut_off is "
        "reached. off: wait for all rollouts; keep: continue them in the next step under its "
        "policy version; drop: train on their groups without them, which favours short completions",
        json_schema_extra=NO_PROGRAM,
    )
    cut_off: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of a sampler's requested rollouts that must finish before its part of "
        "the step ends; required with partial",
        json_schema_extra=NO_PROGRAM,
    )
    dynamic_sampling: Literal["off", "capped"] = Field(
        "off",
        description="replace groups whose rewards are all equal, which have no gradient. capped: "
        "sample further prompts until prompts_per_step groups have signal or max_prompts_per_step "
        "is reached (DAPO, arXiv:2503.14476)",
        json_schema_extra=NO_PROGRAM,
    )
    max_prompts_per_step: int | None = Field(
        None,
        ge=1,
        description="maximum number of prompts that a step samples; required with dynamic_sampling",
        json_schema_extra=NO_PROGRAM,
    )
    ahead: Literal["off", "one"] = Field(
        "off",
        description="one: generate the next step's rollouts while the learner updates, so that all "
        "rollouts after the first step are one policy version old; split placement only",
        json_schema_extra=NO_PROGRAM,
    )
    stop_tokens: Strings = Field(
        ("<end_of_turn>", "<eos>"),
        description="tokens that end a completion; they are trained on. <end_of_turn> is the end "
        "of a turn of any model, <turn|> in Gemma 4",
        json_schema_extra=NO_PROGRAM,
    )
    stop_strings: Strings = Field(
        (),
        description="texts that end a completion once generated; the token that completes the text "
        'is the last one, and the text belongs to the completion, e.g. "</answer>"',
        json_schema_extra=NO_PROGRAM,
    )
    forbidden_tokens: Strings = Field(
        ("<pad>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"),
        description="tokens that are never sampled",
        json_schema_extra=NO_PROGRAM,
    )

    def conflicts(self) -> Iterator[Problem]:
        """Completions can end, bounds are in order, every setting has an effect."""
        both = sorted(set(self.stop_tokens) & set(self.forbidden_tokens))
        if not self.stop_tokens:
            yield "stop_tokens", "no completion could end; give at least one token"
        if both:
            what = f"{', '.join(both)}: also in stop_tokens; a stop token must not be forbidden"
            yield "forbidden_tokens", what
        if self.partial == "off" and self.cut_off is not None:
            what = 'has no effect with rollout.partial = "off"; remove it, or set that to "keep"'
            yield "cut_off", what
        if self.partial != "off" and self.cut_off is None:
            yield "partial", "needs rollout.cut_off, e.g. 0.9; set that"
        if self.fewest_prompts > self.prompts_per_step:
            what = f"must be at most prompts_per_step; nearest valid: {self.prompts_per_step}"
            yield "min_prompts_per_step", what
        if self.overlong_tokens > self.max_new_tokens:
            what = f"must be at most max_new_tokens; nearest valid: {self.max_new_tokens}"
            yield "overlong_tokens", what
        yield from self._dynamic_problems()

    def _dynamic_problems(self) -> Iterator[Problem]:
        most, mode, wanted = self.max_prompts_per_step, self.dynamic_sampling, self.prompts_per_step
        if mode == "off":
            if most is not None:
                what = 'has no effect with rollout.dynamic_sampling = "off"; remove it, or set that'
                yield "max_prompts_per_step", what
            return
        if most is None:
            what = f"needs rollout.max_prompts_per_step, e.g. {3 * wanted}; set that"
            yield "dynamic_sampling", what
        elif most <= wanted:
            what = f"must be above prompts_per_step; nearest valid: {wanted + 1}"
            yield "max_prompts_per_step", what
        if self.partial != "off":
            what = (
                f'"{mode}" needs all rewards of a group before the step ends, and '
                f'rollout.partial = "{self.partial}" ends steps without them; nearest valid: "off"'
            )
            yield "dynamic_sampling", what

    @property
    def truncates(self) -> bool:
        """Whether `top_k`, `top_p` or `min_p` restrict sampling to the most likely tokens."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def size(self) -> int:
        """Rollouts in a step."""
        return self.group_size * self.prompts_per_step

    @property
    def fewest_prompts(self) -> int:
        """Minimum number of prompts in a step."""
        return self.min_prompts_per_step or self.prompts_per_step

    @property
    def prefill_lengths(self) -> tuple[int, ...]:
        """Longest prefill of each kind, in tokens, ascending.

        A prompt; with `partial = "keep"` also a prompt with half of a completion, and a prompt with
        a completion that lacks its last token.
        """
        if self.partial != "keep":
            return (self.max_prompt_tokens,)
        whole, half = self.max_tokens, self.max_prompt_tokens + self.max_new_tokens // 2
        return tuple(sorted({self.max_prompt_tokens, half, whole}))

    @property
    def expected_prompt(self) -> float:
        """Assumed mean tokens of a prompt."""
        return max(1.0, PROMPT_SHARE * self.max_prompt_tokens)

    @property
    def expected_completion(self) -> float:
        """Assumed mean tokens of a completion."""
        return COMPLETION_SHARE * self.max_new_tokens

    @property
    def max_tokens(self) -> int:
        """Maximum length of a sequence: prompt and completion."""
        return self.max_prompt_tokens + self.max_new_tokens
