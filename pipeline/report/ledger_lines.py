"""The ledger of a run as lines of text, for the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.deadline import show_duration
from pipeline.run.ledger import DRIVER, LEARNER, REWARDS, ROWS, SAMPLERS

_LEAST_SHARE = 0.001
"""Rows with a smaller share of all seconds are left out."""


def ledger_lines(measured: Mapping[str, Any]) -> Iterator[str]:
    """Yields where the time went, by kind of process, what became of the tokens, and goodput.

    Args:
        measured: the ledger, goodput, speed and cost of `summary.json`.
    """
    ledger = measured["ledger"]
    seconds: Mapping[str, Mapping[str, float]] = ledger["seconds"]
    kinds = [kind for kind in (DRIVER, LEARNER, SAMPLERS, REWARDS) if kind in seconds]
    total = sum(sum(rows.values()) for rows in seconds.values())
    if not total:
        return
    wall = show_duration(ledger["wall_s"])
    first_s = ledger["first_step_s"]
    first = "" if first_s is None else f"; first optimizer step done after {show_duration(first_s)}"
    yield f"where the time went: {wall} x {ledger['processes']} processes{first}"
    yield "  " + f"{'seconds':<18}" + "".join(f"{kind:>10}" for kind in kinds) + f"{'share':>9}"
    for row in ROWS:
        values = [seconds[kind].get(row, 0.0) for kind in kinds]
        if sum(values) >= _LEAST_SHARE * total:
            shown = "".join(f"{value:>10.1f}" if value else f"{'':>10}" for value in values)
            yield f"  {row.replace('_', ' '):<18}{shown}{sum(values) / total:>9.1%}"
    tokens: Mapping[str, int] = ledger["tokens"]
    if generated := sum(tokens.values()):
        fates = ", ".join(
            f"{count / generated:.1%} {fate.replace('_', ' ')}" for fate, count in tokens.items()
        )
        yield f"tokens: {generated:,} generated, evaluations and repeated work included: {fates}"
    if goodput := measured["goodput"]:
        parts = " x ".join(
            f"{goodput[part]:.1%} {part}" for part in ("scheduling", "runtime", "program")
        )
        yield f"goodput: {goodput['total']:.1%} = {parts}"
    speed = measured["speed"]
    shares = {"mfu": "MFU", "hfu": "HFU", "mfu_int8": "MFU (int8)", "decode_bandwidth": "decode"}
    used = [f"{name} {speed[key]:.1%}" for key, name in shares.items() if key in speed]
    if "useful_tokens_per_s_chip" in speed:
        rate = speed["useful_tokens_per_s_chip"]
        of_limits = f"; of the chips' limits: {', '.join(used)}" if used else ""
        yield f"speed: {rate:,.1f} trained tokens per second and chip{of_limits}"
    if cost := measured["cost"]:
        each = {kind: cost.get(f"usd_per_mtoken_{kind}") for kind in ("generated", "trained")}
        prices = "".join(
            f", {price:,.2f} per million {kind} tokens" for kind, price in each.items() if price
        )
        yield f"cost: {cost['usd']:,.2f} dollars{prices}"
