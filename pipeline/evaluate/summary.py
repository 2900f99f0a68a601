"""The summary of an evaluation: where its metric's mean is, and how it is shown.

A summary has `metric`, a value of `eval.metric`, and the mean over the prompts under `accuracy`
(metric `exact_answer`) or `score` (reward metrics; None if no answer has a score). The facts about
the best version hold the mean under the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ACCURACY, SCORE = "accuracy", "score"
_NO_VALUE = "none"
"""Shown for a mean or an interval that does not exist."""


def mean_key(summary: Mapping[str, Any]) -> str:
    """The key of the metric's mean."""
    return ACCURACY if ACCURACY in summary else SCORE


def mean_of(summary: Mapping[str, Any]) -> float | None:
    """The metric's mean; None if no answer has a value."""
    found: float | None = summary[mean_key(summary)]
    return found


def prompts_of(summary: Mapping[str, Any]) -> int:
    """Number of evaluated prompts; `n` counts those whose answers have a value."""
    found: int = summary.get("prompts", summary["n"])
    return found


def metric_title(summary: Mapping[str, Any]) -> str:
    """`accuracy`, or the value of `eval.metric`."""
    return ACCURACY if ACCURACY in summary else str(summary["metric"])


def show_mean(summary: Mapping[str, Any]) -> str:
    """The mean: `70.0%` for an accuracy, `0.712` for a score."""
    return _shown(mean_of(summary), summary)


def show_interval(summary: Mapping[str, Any]) -> str:
    """The 95% interval of the mean in brackets."""
    bounds: Sequence[float] | None = summary["ci95"]
    if bounds is None:
        return _NO_VALUE
    return f"[{', '.join(_shown(bound, summary) for bound in bounds)}]"


def show_change(
    before: Mapping[str, Any], after: Mapping[str, Any], compared: Mapping[str, Any]
) -> str:
    """Both means and the paired difference with its interval: `0.2 -> 0.3: +0.1 [+0.0, +0.2]`."""
    means = f"{show_mean(before)} -> {show_mean(after)}"
    difference, bounds = compared["paired_difference"], compared["paired_ci95"]
    if difference is None:
        return f"{means}: no prompt has a score in both"
    accuracy = ACCURACY in before

    def shown(value: float) -> str:
        return f"{100 * value:+.1f}" if accuracy else f"{value:+{_number_format(value)}}"

    interval = "no interval" if bounds is None else f"[{', '.join(map(shown, bounds))}]"
    return f"{means}: {shown(difference)}{' points' if accuracy else ''} {interval}"


def show_number(value: float) -> str:
    """A score: three decimals, or an exponent if it is large."""
    return f"{value:{_number_format(value)}}"


def _shown(value: float | None, summary: Mapping[str, Any]) -> str:
    if value is None:
        return _NO_VALUE
    return f"{value:.1%}" if ACCURACY in summary else show_number(value)


def _number_format(value: float) -> str:
    return ".3f" if abs(value) < 1e6 else ".3g"
