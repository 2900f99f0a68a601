"""Which metric a run has: the configured one, or what its rewards and data give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.evaluation import EXACT_ANSWER, WEIGHTED_SUM, unused_extraction
from configs.schema import Config
from pipeline.data.splits import LoadedSplit


def with_metric(
    config: Config,
    splits: Mapping[str, LoadedSplit | None],
    *,
    saved: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration with `eval.metric` set, for the splits to evaluate.

    An unset one is that of the run that is resumed, so that its evaluations stay comparable; else
    `Config.metric`, with the weighted sum of the rewards in place of `exact_answer` if no row has a
    reference answer. `saved` is the configuration of the run's last start; None: it is new.

    Raises:
        ValueError: if the rewards no longer have the metric of the run that is resumed, or if the
            metric is a reward, which does not use `eval.extraction`.
    """
    if config.eval.metric is not None:
        return config
    before = None if saved is None else saved["eval"].get("metric")
    if before is not None:
        names = config.metric_names
        if before not in names:
            raise ValueError(
                f"eval.metric: the run selects its best version by the reward {before!r}, which is "
                f"not one of {', '.join(names)}; keep it, with weight = 0 if it is not to be "
                "trained on, or start another run with --run.name"
            )
        return _with(config, before)
    prompts = [prompt for split in splits.values() if split for prompt in split.prompts]
    without = prompts and all(prompt.answer is None for prompt in prompts)
    is_exact = config.metric == EXACT_ANSWER
    return _with(config, WEIGHTED_SUM if is_exact and without else config.metric)


def _with(config: Config, metric: str) -> Config:
    if metric != EXACT_ANSWER and config.eval.extraction is not None:
        raise ValueError(f"eval.extraction: {unused_extraction(metric)}")
    return config.with_metric(metric)


def check_references(config: Config, splits: Mapping[str, LoadedSplit | None]) -> None:
    """Refuses the metric `exact_answer` for prompts without reference answers.

    Raises:
        ValueError: with a line for each such split.
    """
    if config.uses_rewards:
        return
    parts = ", ".join(part.name for part in config.rewards.functions)
    mistakes = []
    for name, split in splits.items():
        missing = sum(prompt.answer is None for prompt in split.prompts) if split else 0
        if split and missing:
            whole = missing == len(split.prompts)
            rows = "its rows have" if whole else f"{missing} of its {len(split.prompts)} rows have"
            mistakes.append(
                f"{name}: {rows} no reference answer in column {config.data.answer_column!r}; set "
                f'data.answer_column, or eval.metric to "{WEIGHTED_SUM}" or a reward part: {parts}'
            )
    if mistakes:
        raise ValueError("\n".join(mistakes))
