"""From completions to rollouts: text, rewards, advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, groupby

from configs.schema import Config, Rewards
from configs.task import OVERLONG
from pipeline.contracts.rollouts import Completion, Prompt, Rollout
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.rollout.advantages import GroupStats, group_advantages
from rewards.base import Outcome, RewardInput, Tags, printable
from rewards.overlong import overlong_punishment
from rewards.weighting import combine, shuffle_rewards


def reward_inputs(
    completions: Sequence[Completion],
    prompts: Mapping[int, Prompt],
    *,
    maker: PromptMaker,
    tags: Tags,
) -> list[RewardInput]:
    """The input of the reward functions for each completion."""
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


SUM = "weighted sum"
"""Name under which errors of the weighted sum are counted; no reward function can have it."""


def reward_errors(outcomes: Sequence[Mapping[str, Outcome]]) -> dict[str, list[str]]:
    """The errors of each failed reward function, rollout by rollout."""
    errors: dict[str, list[str]] = {}
    for row in outcomes:
        for name, outcome in row.items():
            if outcome.error is not None:
                errors.setdefault(name, []).append(outcome.error)
    return errors


def too_many_excluded(
    rollouts: Sequence[Rollout], errors: Mapping[str, Sequence[str]], rewards: Rewards
) -> str | None:
    """The reason to stop if too many rollouts have no reward; None: enough have one.

    Args:
        rollouts: all rollouts of the step.
        errors: of their rewards, as `score_rollouts` returns them.
        rewards: settings with the allowed share and the weights.
    """
    excluded, most = sum(rollout.reward is None for rollout in rollouts), rewards.max_excluded_share
    if excluded <= most * len(rollouts):
        return None
    unweighted = {part.name for part in rewards.functions if not part.weight}
    failed = "; ".join(
        f"{name!r} failed {len(reasons)} times, first: {reasons[0]}"
        for name, reasons in errors.items()
        if name not in unweighted
    )
    return (
        f"{excluded} of {len(rollouts)} rollouts ({excluded / len(rollouts):.1%}) have no reward, "
        f"more than rewards.max_excluded_share = {most:g} allows: {failed}"
    )


def score_rollouts(
    completions: Sequence[Completion],
    inputs: Sequence[RewardInput],
    outcomes: Sequence[Mapping[str, Outcome]],
    *,
    config: Config,
    step: int,
) -> tuple[list[Rollout], GroupStats, dict[str, list[str]]]:
    """Rollouts with rewards and advantages, group statistics and errors.

    A rollout whose weighted sum is not finite has no reward: an error of `SUM`.

    Args:
        completions: finished completions, group by group; rollouts keep their order.
        inputs: of the reward functions.
        outcomes: of each reward function, by name.
        config: weights, kind of advantage, and whether rewards are shuffled.
        step: seeds the shuffling.
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
    errors = reward_errors(outcomes)
    rewards = [combine(row, weights=weights) for row in parts]
    for index, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            rewards[index] = None
            errors.setdefault(SUM, []).append(_overflow(parts[index], weights))
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
    return rollouts, stats, errors


def _overflow(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> str:
    terms = (f"{weights[name]:g} x {parts[name]:g} ({name})" for name in parts if weights[name])
    return printable(f"is not a finite number: {' + '.join(terms)}")
