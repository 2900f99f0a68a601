"""From completions to rollouts: text, rewards, advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby

from configs.schema import Config
from configs.task import OVERLONG
from pipeline.advantages import GroupStats, group_advantages
from pipeline.datatypes import Completion, Prompt, Rollout
from pipeline.text.prompts import PromptMaker
from rewards.base import Outcome, RewardInput, Tags
from rewards.overlong import overlong_punishment
from rewards.weighting import combine, shuffle_rewards


def reward_inputs(
    completions: Sequence[Completion],
    prompts: Mapping[int, Prompt],
    *,
    maker: PromptMaker,
    tags: Tags,
) -> list[RewardInput]:
    """What reward functions see of each completion."""
    inputs = []
    for completion in completions:
        prompt = prompts[completion.name.prompt_id]
        inputs.append(
            RewardInput(
                prompt=prompt.text,
                completion=maker.text_of(completion),
                stop_reason=completion.stop_reason,
                answer=prompt.answer,
                row=prompt.row,
                tags=tags,
                source=prompt.source,
            )
        )
    return inputs


def reward_errors(outcomes: Sequence[Mapping[str, Outcome]]) -> dict[str, list[str]]:
    """For each reward function that failed what went wrong, rollout by rollout."""
    errors: dict[str, list[str]] = {}
    for row in outcomes:
        for name, outcome in row.items():
            if outcome.error is not None:
                errors.setdefault(name, []).append(outcome.error)
    return errors


def score_rollouts(
    completions: Sequence[Completion],
    inputs: Sequence[RewardInput],
    outcomes: Sequence[Mapping[str, Outcome]],
    *,
    config: Config,
    step: int,
) -> tuple[list[Rollout], GroupStats]:
    """Rollouts with rewards and advantages, in the order of the completions.

    Args:
        completions: group by group, as many of each as have ended.
        inputs: their texts.
        outcomes: of each reward function, by name.
        config: weights, kind of advantage, and whether rewards are shuffled.
        step: for shuffling.
    """
    weights = {part.name: part.weight for part in config.rewards.functions}
    parts = [{name: outcome.value for name, outcome in row.items()} for row in outcomes]
    if config.rollout.overlong_tokens:
        weights[OVERLONG] = 1.0
        for completion, row in zip(completions, parts, strict=True):
            row[OVERLONG] = overlong_punishment(
                len(completion.tokens),
                budget=config.rollout.max_new_tokens,
                tokens=config.rollout.overlong_tokens,
            )
    rewards = [combine(row, weights=weights) for row in parts]
    if config.rewards.shuffle:
        rewards = shuffle_rewards(rewards, seed=config.run.seed, step=step)
    named = zip((completion.name.group for completion in completions), rewards, strict=True)
    groups = [[reward for _, reward in own] for _, own in groupby(named, key=lambda one: one[0])]
    advantages, stats = group_advantages(groups, kind=config.learner.variant.advantage)
    rollouts = [
        Rollout(completion, given.completion, row, reward, float(advantage), given.source)
        for completion, given, row, reward, advantage in zip(
            completions, inputs, parts, rewards, chain(*advantages), strict=True
        )
    ]
    return rollouts, stats
