"""From completions to rollouts: text, rewards, advantages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from configs.schema import Config, Rewards
from configs.task import OVERLONG
from pipeline.data.text.prompts import PromptMaker
from pipeline.protocols import Scorer
from pipeline.rollout.advantages import group_advantages
from pipeline.types import Completion, Prompt, Rollout
from rewards.base import NAME_SEPARATOR, Outcome, RewardError, RewardInput, Tags
from rewards.length import overlong_punishment
from rewards.weighting import combine, shuffle_rewards


def reward_inputs(
    completions: Sequence[Completion],
    prompts: Mapping[int, Prompt],
    *,
    maker: PromptMaker,
    tags: Tags,
) -> list[RewardInput]:
    """The input of the reward functions for each completion."""
    return [
        prompts[completion.name.prompt_id].reward_input(
            maker.text_of(completion), stop_reason=completion.stop_reason, tags=tags
        )
        for completion in completions
    ]


SUM = "weighted sum"
"""Name under which errors of the weighted sum are counted; no reward function can have it."""

NOT_APPLICABLE = "not_applicable"
"""Why a rollout is excluded if all its weighted parts are None."""

OTHERS_FAILED = "group"
"""Why a rollout is excluded if a reward of another rollout of its group failed."""


class EarlyScoring:
    """Scores rollouts when they end, while others are sampled.

    Args:
        scorer: the reward workers.
        inputs_of: makes their inputs from completions.
    """

    def __init__(
        self, scorer: Scorer, inputs_of: Callable[[Sequence[Completion]], list[RewardInput]]
    ) -> None:
        self._scorer = scorer
        self._inputs_of = inputs_of
        self._scored: dict[object, tuple[asyncio.Task[list[dict[str, Outcome]]], int]] = {}

    def add(self, completions: Sequence[Completion]) -> None:
        """Begins to score completions."""
        if not completions:
            return
        inputs = self._inputs_of(completions)
        task = asyncio.create_task(self._scorer.score(inputs))
        self._scored |= {_key(one): (task, index) for index, one in enumerate(inputs)}

    async def outcomes(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """The outcome of each function for each input, scored before or now."""
        rest = [one for one in inputs if _key(one) not in self._scored]
        last = asyncio.create_task(self._scorer.score(rest))
        await asyncio.gather(last, *{task for task, _ in self._scored.values()})
        scored, found = iter(last.result()), []
        for one in inputs:
            early = self._scored.get(_key(one))
            found.append(next(scored) if early is None else early[0].result()[early[1]])
        return found

    def cancel(self) -> None:
        """Abandons what is being scored."""
        for task, _ in self._scored.values():
            task.cancel()


def _key(one: RewardInput) -> object:
    """What identifies an input of a step: equal completions of a prompt have equal scores."""
    return one.prompt_id, one.completion, one.stop_reason


def reward_errors(rollouts: Sequence[Rollout]) -> dict[str, list[RewardError]]:
    """The errors of each failed part, rollout by rollout."""
    errors: dict[str, list[RewardError]] = {}
    for rollout in rollouts:
        for name, error in rollout.errors.items():
            errors.setdefault(name, []).append(error)
    return errors


def stopping_error(rollouts: Sequence[Rollout], rewards: Rewards) -> str | None:
    """The first error of a part whose errors stop the run (`on_error = "stop"`), in words."""
    stops = {part.name for part in rewards.functions if part.on_error == "stop"}
    for rollout in rollouts:
        for name in stops & rollout.errors.keys():
            prompt = f"prompt {rollout.completion.name.prompt_id}"
            return f"reward {name!r} failed for {prompt}: {rollout.errors[name].message}"
    return None


def score_rollouts(
    completions: Sequence[Completion],
    inputs: Sequence[RewardInput],
    outcomes: Sequence[Mapping[str, Outcome]],
    *,
    config: Config,
    step: int,
) -> list[Rollout]:
    """Rollouts with rewards and advantages.

    A rollout whose weighted sum is not finite has no reward: an error of `SUM`.

    Args:
        completions: finished completions, group by group; rollouts keep their order.
        inputs: of the reward functions.
        outcomes: of each reward function, by name.
        config: weights, kind of advantage, and whether rewards are shuffled.
        step: seeds the shuffling.
    """
    scored = [
        score_one(completion, one, parts, config)
        for completion, one, parts in zip(completions, inputs, outcomes, strict=True)
    ]
    groups = [
        _exclude_group(list(own), config.rewards)
        for _, own in groupby(scored, key=lambda rollout: rollout.completion.name.group)
    ]
    rewards = [rollout.reward for group in groups for rollout in group]
    if config.rewards.shuffle:
        rewards = shuffle_rewards(rewards, seed=config.run.seed, step=step)
    left = iter(rewards)
    grouped = [[next(left) for _ in group] for group in groups]
    kind = config.learner.variant.advantage
    advantages = [group_advantages(group, kind=kind) for group in grouped]
    return [
        replace(rollout, reward=reward, advantage=float(advantage))
        for rollout, reward, advantage in zip(
            chain(*groups), rewards, chain(*advantages), strict=True
        )
    ]


@dataclass(frozen=True)
class Scores:
    """The scores of one rollout by itself; the fields are those of `Rollout`."""

    rewards: Mapping[str, float | None]
    reward: float | None
    errors: Mapping[str, RewardError]
    excluded: str | None


def score_one(
    completion: Completion, given: RewardInput, outcomes: Mapping[str, Outcome], config: Config
) -> Rollout:
    """The rollout with its parts and their weighted sum, without an advantage.

    Other rollouts have no influence: neither `on_error = "group"` nor `rewards.shuffle` applies.
    """
    scores = score_parts(outcomes, num_tokens=len(completion.tokens), config=config)
    return Rollout(completion, given, advantage=0.0, **vars(scores))


def score_parts(outcomes: Mapping[str, Outcome], *, num_tokens: int, config: Config) -> Scores:
    """The parts, the one of `rollout.overlong_tokens` included, and their weighted sum.

    Args:
        outcomes: of the reward functions, by name.
        num_tokens: number of sampled tokens.
        config: weights, and the token limits.
    """
    parts, rollout = dict(outcomes), config.rollout
    weights = config.reward_weights
    if rollout.overlong_tokens:
        parts[OVERLONG] = Outcome(
            overlong_punishment(
                num_tokens, budget=rollout.max_new_tokens, tokens=rollout.overlong_tokens
            )
        )
    errors = {name: part.error for name, part in parts.items() if part.error is not None}
    reward, excluded = combine(parts, weights=weights), None
    if reward is None:
        causes = [error.cause for name, error in errors.items() if weights[name]]
        excluded = causes[0] if causes else NOT_APPLICABLE
    elif not math.isfinite(reward):
        reward, excluded = None, "not_finite"
        errors[SUM] = RewardError("not_finite", "is not a finite number")
    values: dict[str, float | None] = {}
    for name, part in parts.items():
        values[name] = part.value
        values |= {f"{name}{NAME_SEPARATOR}{key}": one for key, one in part.named.items()}
    return Scores(values, reward, errors, excluded)


def _exclude_group(group: list[Rollout], rewards: Rewards) -> list[Rollout]:
    """The group without rewards if a part failed whose errors exclude the group."""
    excluding = {part.name for part in rewards.functions if part.on_error == "group"}
    if not any(excluding & rollout.errors.keys() for rollout in group):
        return group
    return [
        replace(rollout, reward=None, excluded=rollout.excluded or OTHERS_FAILED)
        for rollout in group
    ]
