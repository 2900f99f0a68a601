"""Compares base and tuned policy on the same prompts: JSON document, table, all answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.evaluate import evaluation
from pipeline.evaluate.measurement import Measured
from pipeline.evaluate.summary import (
    metric_title,
    prompts_of,
    show_change,
    show_interval,
    show_mean,
)
from pipeline.tables import table

_SHARES = {
    "excluded": "excluded",
    "correct": "correct",
    "well_formed": "well formed",
    "format_only": "form only",
    "unanswered": "no answer",
    "truncated": "cut off",
}
"""Titles of shares in the table by key; those that all sets lack are not shown."""


def document(
    *,
    protocol: Mapping[str, Any],
    data: Mapping[str, Mapping[str, Any]],
    base: Measured,
    tuned: Measured | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """The result as JSON; without `tuned` only the base was measured.

    `protocol`, and for each set `data`, are results of `pipeline.evaluate.protocol`.
    """
    sets = {}
    for name, facts in data.items():
        before = base.evaluations[name]
        if tuned is None:
            sets[name] = {**facts, "base": before.summary(), "tuned": None}
            continue
        changes = evaluation.compare(before, tuned.evaluations[name])
        both = {"base": changes.pop("before"), "tuned": changes.pop("after")}
        sets[name] = {**facts, **both, **changes}
    return {
        "protocol": dict(protocol),
        "base": vars(base.adapter),
        "tuned": vars(tuned.adapter) if tuned else None,
        "notes": list(notes),
        "sets": sets,
    }


def answer_rows(base: Measured, tuned: Measured | None) -> Iterator[dict[str, Any]]:
    """Each answer as a JSON object, set by set, first those of the base."""
    for name in base.evaluations:
        for policy, measured in (("base", base), ("tuned", tuned)):
            if measured is not None:
                for row in measured.evaluations[name].rows:
                    yield {"set": name, "policy": policy, **row}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The document as text, without its protocol: table, changes, notes."""
    for policy in ("base", "tuned"):
        if found[policy] is not None:
            yield f"{policy}: {found[policy]['what']}, sha256 {found[policy]['sha256'][:12]}"
    yield ""
    yield from table(list(_table(found["sets"])), left=(0, 1))
    yield ""
    for name, one in found["sets"].items():
        if one["tuned"] is not None:
            change = f"{name}: {show_change(one['base'], one['tuned'], one)}"
            if one["paired_p"] is not None:
                change += f", p = {one['paired_p']:.1e} ({one['paired_test']}); prompts gained: "
                change += f"{one['gained']}, lost: {one['lost']}"
            yield change
        left_out = one["malformed"] + one["too_long"]
        if left_out:
            yield f"{name}: {left_out} rows are left out and not counted"
    yield from (f"note: {note}" for note in found["notes"])


def _table(sets: Mapping[str, Any]) -> Iterator[list[str]]:
    """The rows of the table, titles first; a share that only other sets have is empty."""
    rows = [
        (name, policy, one[policy])
        for name, one in sets.items()
        for policy in ("base", "tuned")
        if one[policy] is not None
    ]
    summaries = [summary for _, _, summary in rows]
    found = dict.fromkeys(key for summary in summaries for key in summary)
    shares = [key for key in _SHARES if key in found]
    votes = [key for key in found if "@" in key and not key.endswith("@1")]
    titles = [_SHARES[key] for key in shares]
    yield ["set", "policy", "prompts", metric_title(summaries[0]), "95%", *titles, "tokens", *votes]
    for name, policy, summary in rows:
        several = f" x {summary['samples']}" if summary["samples"] > 1 else ""
        known = {key: f"{summary[key]:.1%}" for key in (*shares, *votes) if key in summary}
        yield [
            *(name, policy, f"{prompts_of(summary)}{several}"),
            *(show_mean(summary), show_interval(summary)),
            *(known.get(key, "") for key in shares),
            f"{summary['num_tokens_mean']:.1f}",
            *(known.get(key, "") for key in votes),
        ]
