"""Compares base and tuned policy on the same prompts: JSON document, table, all answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.evaluate import evaluation
from pipeline.evaluate.evaluation import Evaluation
from pipeline.evaluate.measurement import Measured
from pipeline.evaluate.protocol import protocol_lines

_COLUMNS = ("set", "policy", "prompts", "accuracy", "95%", "well formed", "form only", "no answer")
_MORE_COLUMNS = ("cut off", "tokens")
_CHANGES = ("paired_difference", "paired_ci95", "paired_p", "paired_test", "gained", "lost")


def document(
    *,
    protocol: Mapping[str, Any],
    data: Mapping[str, Mapping[str, Any]],
    base: Measured,
    tuned: Measured | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """The result as JSON.

    Args:
        protocol: the result of `protocol.protocol`.
        data: for each set the result of `protocol.data_facts`.
        base: the base alone.
        tuned: the base with the adapter; None: only the base was measured.
        notes: remarks on the numbers.
    """
    sets = {}
    for name, facts in data.items():
        before = base.evaluations[name]
        after = tuned.evaluations[name] if tuned else None
        sets[name] = {**facts, **_compared(before, after)}
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
    """The document as text: protocol, table, changes, notes."""
    yield from protocol_lines(found["protocol"])
    for policy in ("base", "tuned"):
        if found[policy] is not None:
            yield f"{policy}: {found[policy]['what']}, sha256 {found[policy]['sha256'][:12]}"
    yield ""
    rows = [list(_COLUMNS + _MORE_COLUMNS + tuple(_votes(found)))]
    for name, one in found["sets"].items():
        measured = [policy for policy in ("base", "tuned") if one[policy] is not None]
        rows += [_row(name, policy, one[policy]) for policy in measured]
    yield from _aligned(rows)
    yield ""
    for name, one in found["sets"].items():
        if one["tuned"] is not None:
            yield f"{name}: {_change(one)}"
        left_out = one["malformed"] + one["too_long"]
        if left_out:
            yield f"{name}: {left_out} rows are left out and not counted"
    yield from (f"note: {note}" for note in found["notes"])


def _compared(before: Evaluation, after: Evaluation | None) -> dict[str, Any]:
    if after is None:
        return {"base": before.summary(), "tuned": None}
    found = evaluation.compare(before, after)
    changes = {key: found[key] for key in _CHANGES}
    return {"base": found["before"], "tuned": found["after"], **changes}


def _change(one: Mapping[str, Any]) -> str:
    points = 100 * one["paired_difference"]
    low, high = (100 * bound for bound in one["paired_ci95"])
    return (
        f"{one['base']['accuracy']:.1%} -> {one['tuned']['accuracy']:.1%}: {points:+.1f} points "
        f"[{low:+.1f}, {high:+.1f}], p = {one['paired_p']:.1e} ({one['paired_test']}); "
        f"prompts gained: {one['gained']}, lost: {one['lost']}"
    )


def _votes(found: Mapping[str, Any]) -> list[str]:
    """Names of the pass@k and majority@k values if there are several samples; same in all sets."""
    summary = next(iter(found["sets"].values()))["base"]
    return [key for key in summary if "@" in key and not key.endswith("@1")]


def _row(name: str, policy: str, summary: Mapping[str, Any]) -> list[str]:
    low, high = summary["ci95"]
    shares = [summary[key] for key in ("well_formed", "format_only", "unanswered", "truncated")]
    votes = [summary[key] for key in summary if "@" in key and not key.endswith("@1")]
    samples = summary["samples"]
    return [
        name,
        policy,
        f"{summary['n']}" + (f" x {samples}" if samples > 1 else ""),
        f"{summary['accuracy']:.1%}",
        f"[{low:.1%}, {high:.1%}]",
        *(f"{share:.1%}" for share in shares),
        f"{summary['num_tokens_mean']:.1f}",
        *(f"{vote:.1%}" for vote in votes),
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned columns: the first two left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
