"""Metrics of a step's rollouts.

    reward/mean, std, group_std         of the weighted sum
    reward/corr_length, corr_correct    its correlation with the number of tokens, with correctness
    reward/excluded_share               rollouts without a reward; reward/excluded/CAUSE by cause
    reward/errors                       scores that failed, of all parts
    reward/PART                         mean of a part; reward/PART/NAME of its named numbers
    reward_parts/PART/STATISTIC:
        group_std                       mean over groups of the standard deviation
        corr_length, corr_correct       as above
        none_share, error_share         returned None, failed; error_share/CAUSE by cause
    groups/mixed, all_equal             groups whose advantages differ from 0; with equal rewards
    groups/short                        with fewer than two rewards
    groups/all_right, all_wrong         groups in which each rollout is right; is wrong
    advantage/std, max                  of the rollouts with a reward; 0 in groups without signal
    rollout/tokens_mean, max            tokens of a completion, the stop token included
    rollout/tokens_q05, q50, q95        their quantiles at 5, 50 and 95%
    rollout/tokens_right, tokens_wrong  mean tokens of right and wrong rollouts
    rollout/correct_share               right rollouts, where that is known
    rollout/well_formed_share           rollouts with the requested format that ended by themselves
    rollout/truncated_share             rollouts that reached the token limit
    rollout/stop/REASON                 share of eos, length, and stop_string if there are any
    rollout/entropy                     nats a token: minus the mean log-prob of the sampled tokens,
                                        an estimate of the policy's entropy (learner/entropy is
                                        exact, of the learned tokens)
    rollout/NAME_half_width             half the width of the 95% interval of correct_share,
                                        well_formed_share and entropy, with groups as samples
    rollout/repetition                  `part_statistics.repetition`, mean over completions

A rollout is right if it has the exact answer, or if the reward says so that is `eval.metric` and
gives 1 to right answers and 0 to wrong ones (`Config.has_accuracy_reward`).

Means are over the rollouts that have the value. A metric that is not defined is left out, and so
are causes that do not occur: an error is not a zero. A mixture adds `reward/SOURCE/...`,
`rollout/SOURCE/count` and `rollout/SOURCE/tokens_mean`. The samplers' work is in
`types.py`; the counts of partial rollouts, dynamic sampling and sampling ahead are in
`rollout_step.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from configs.schema import Config
from pipeline.rollout.part_statistics import Groups, correlation, repetition
from pipeline.types import Rollout
from rewards.answers import is_correct
from rewards.base import NAME_SEPARATOR
from rewards.format import is_well_formed

_LENGTH_PERCENTILES = (5, 50, 95)


def step_metrics(rollouts: Sequence[Rollout], config: Config) -> dict[str, float]:
    """Metrics of rewards, groups and lengths.

    Args:
        rollouts: of the step, group by group. Without rollouts there are only the group counts.
        config: weights of the parts, and how answers are extracted.
    """
    if not rollouts:
        return dict.fromkeys(("groups/mixed", "groups/all_equal", "groups/short"), 0.0)
    metrics = _reward_metrics(rollouts, "reward") | _statistics(rollouts, config)
    for source in sorted({rollout.source for rollout in rollouts if rollout.source is not None}):
        own = [rollout for rollout in rollouts if rollout.source == source]
        metrics |= _reward_metrics(own, f"reward/{source}")
        metrics |= {
            f"rollout/{source}/count": float(len(own)),
            f"rollout/{source}/tokens_mean": _mean([len(r.completion.tokens) for r in own]),
        }
    return metrics | _completions(rollouts, config)


def _reward_metrics(rollouts: Sequence[Rollout], prefix: str) -> dict[str, float]:
    """Share of excluded rollouts, mean and deviation of the sum, means of parts."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    metrics = {f"{prefix}/excluded_share": 1 - len(rewards) / len(rollouts)}
    if rewards:
        metrics |= {f"{prefix}/mean": _mean(rewards), f"{prefix}/std": float(np.std(rewards))}
    for name in _part_names(rollouts):
        scored = _numbers([rollout.rewards[name] for rollout in rollouts])
        if scored:
            metrics[f"{prefix}/{name}"] = _mean(scored)
    return metrics


def _statistics(rollouts: Sequence[Rollout], config: Config) -> dict[str, float]:
    """Named numbers, causes of exclusion, and statistics of the sum and its parts."""
    groups = Groups([rollout.completion.name.group for rollout in rollouts])
    parts = _part_names(rollouts)
    values = _series([[rollout.rewards[part] for part in parts] for rollout in rollouts])
    (reward,) = _series([[rollout.reward] for rollout in rollouts])
    # NaN where it is not known whether the answer is right.
    table = [[len(rollout.completion.tokens), _right(rollout, config)] for rollout in rollouts]
    lengths, correct = _series(table)
    yardsticks = {"corr_length": lengths, "corr_correct": correct}
    found: dict[str, float | None] = {
        "reward/group_std": groups.spread(reward[None])[0],
        "reward/errors": float(sum(len(rollout.errors) for rollout in rollouts)),
        **{f"reward/{key}": correlation(reward, other) for key, other in yardsticks.items()},
        **_shares("reward/excluded", [rollout.excluded for rollout in rollouts]),
        **_named_means(rollouts),
    }
    found |= _signal(rollouts, groups)
    found |= _answers(correct, lengths, groups) | _watched(rollouts, correct, lengths, groups)
    spreads = groups.spread(values)
    for number, part in enumerate(parts):
        prefix, own = f"reward_parts/{part}", values[number]
        found[f"{prefix}/group_std"] = spreads[number]
        found |= {f"{prefix}/{key}": correlation(own, other) for key, other in yardsticks.items()}
        found |= _missing(rollouts, part)
    return {name: value for name, value in found.items() if value is not None}


def _signal(rollouts: Sequence[Rollout], groups: Groups) -> dict[str, float]:
    """Counts of the groups with and without signal, and the spread of the advantages."""
    values = np.array([one.advantage for one in rollouts])
    rewarded = np.array([one.reward is not None for one in rollouts])
    differs, rewards = groups.sums(np.array([values != 0, rewarded]))
    mixed, short = differs > 0, rewards < 2
    found = {
        "groups/mixed": float(mixed.sum()),
        "groups/all_equal": float((~mixed & ~short).sum()),
        "groups/short": float(short.sum()),
    }
    if rewarded.any():
        found |= {
            "advantage/std": float(values[rewarded].std()),
            "advantage/max": float(values[rewarded].max()),
        }
    return found


def _answers(correct: np.ndarray, lengths: np.ndarray, groups: Groups) -> dict[str, float]:
    """Groups, shares and lengths by right and wrong; nothing where none is known."""
    right, wrong = correct == 1, correct == 0
    if not (right | wrong).any():
        return {}
    by_answer = {"right": right, "wrong": wrong}
    return {
        **{f"groups/all_{name}": float(groups.all(own)) for name, own in by_answer.items()},
        **{
            f"rollout/tokens_{name}": _mean(lengths[own])
            for name, own in by_answer.items()
            if own.any()
        },
    }


def _watched(
    rollouts: Sequence[Rollout], correct: np.ndarray, lengths: np.ndarray, groups: Groups
) -> dict[str, float | None]:
    """Shares of right and well-formed completions, and the entropy, with their intervals."""
    completions = [rollout.completion for rollout in rollouts]
    formed = [
        is_well_formed(rollout.text, stop_reason=one.stop_reason, tags=rollout.given.tags)
        for rollout, one in zip(rollouts, completions, strict=True)
    ]
    surprise = np.array([-one.logprobs.sum(dtype=float) for one in completions])
    totals = {
        "correct_share": (np.nan_to_num(correct), ~np.isnan(correct)),
        "well_formed_share": (np.array(formed), np.ones(len(formed))),
        "entropy": (surprise, lengths),
    }
    found: dict[str, float | None] = {}
    for name, (sums, counts) in totals.items():
        found[f"rollout/{name}"], found[f"rollout/{name}_half_width"] = groups.ratio(sums, counts)
    return found


def _completions(rollouts: Sequence[Rollout], config: Config) -> dict[str, float]:
    """Lengths, stop reasons and repetition."""
    completions = [rollout.completion for rollout in rollouts]
    lengths = [len(completion.tokens) for completion in completions]
    reasons = [completion.stop_reason for completion in completions]
    possible = ("eos", "length", *(["stop_string"] if config.rollout.stop_strings else []))
    stops = {name: _mean([reason == name for reason in reasons]) for name in possible}
    repeated = _numbers([repetition(completion.tokens) for completion in completions])
    return {
        "rollout/tokens_mean": _mean(lengths),
        "rollout/tokens_max": float(max(lengths)),
        **{
            f"rollout/tokens_q{percent:02}": float(np.percentile(lengths, percent))
            for percent in _LENGTH_PERCENTILES
        },
        "rollout/truncated_share": stops["length"],
        **{f"rollout/stop/{name}": share for name, share in stops.items()},
        **({"rollout/repetition": _mean(repeated)} if repeated else {}),
    }


def _part_names(rollouts: Sequence[Rollout]) -> list[str]:
    """The parts, without the numbers that they return by name."""
    return [name for name in rollouts[0].rewards if NAME_SEPARATOR not in name]


def _series(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Columns of a table as float64 `columns rows`, NaN for None."""
    return np.array(rows, dtype=float).T


def _right(rollout: Rollout, config: Config) -> float | None:
    given = rollout.given
    if config.has_accuracy_reward:
        return rollout.rewards[config.metric]
    if given.answer is None:
        return None
    place = config.extraction
    return is_correct(rollout.text, answer=given.answer, tags=given.tags, extraction=place)


def _named_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means of the numbers that parts return by name."""
    named: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.rewards.items():
            if NAME_SEPARATOR in name and value is not None:
                named.setdefault(name, []).append(value)
    return {f"reward/{name}": _mean(values) for name, values in named.items()}


def _missing(rollouts: Sequence[Rollout], name: str) -> dict[str, float]:
    """Shares of rollouts for which a part failed, by cause, or returned None."""
    prefix = f"reward_parts/{name}"
    errors = [rollout.errors.get(name) for rollout in rollouts]
    causes = [None if error is None else error.cause for error in errors]
    none = [
        cause is None and rollout.rewards[name] is None
        for rollout, cause in zip(rollouts, causes, strict=True)
    ]
    return {
        f"{prefix}/none_share": _mean(none),
        f"{prefix}/error_share": _mean([cause is not None for cause in causes]),
        **_shares(f"{prefix}/error_share", causes),
    }


def _shares(prefix: str, causes: Sequence[str | None]) -> dict[str, float]:
    """Share of each cause that occurs."""
    counts = Counter(cause for cause in causes if cause is not None)
    return {f"{prefix}/{cause}": count / len(causes) for cause, count in sorted(counts.items())}


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values))
