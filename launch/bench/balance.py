"""`python -m launch.bench balance`: the sizes that a run chooses beside fixed ones.

Runs of `launch.train` on the demo, one after the other, with a learning rate that changes nothing:
rollouts are drawn by their names, so all runs sample and train on the same tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from launch.bench.harness import Claim, Figures, Found, Row, Section
from launch.bench.launched import trained

CHOSEN = "chosen"
FIXED = (24, 64, 192)
"""Numbers of slots."""
BEST = 0.9
"""Smallest allowed share of the best fixed size's speed; runs differ by a few percent."""
SETTINGS: dict[str, Any] = {
    "learner.lr": 1e-9,
    "plan.slot_buckets": "none",
    "plan.micro_batch_tokens": "none",
    "data.validation.limit": 8,
    "data.test.limit": 8,
    "eval.every_steps": 1000,
    "checkpoint.every_steps": 1000,
}


def tokens_a_second(*, slots: int | None, prompts: int, steps: int) -> Figures:
    """Trained tokens a second of a run's steps but the first; slots None: the run chooses them."""
    settings = SETTINGS | {
        "plan.slots": slots or "none",
        "rollout.prompts_per_step": prompts,
        "budget.steps": steps,
    }
    with trained("configs/demo.toml", settings, environment={}) as run:
        rows, sizes = run.metrics[1:], run.plan["sizes"]
    seconds = sum(row["time/step_s"] for row in rows)
    return {
        **sizes,
        "tokens_per_s": sum(row["learner/tokens_trained"] for row in rows) / seconds,
        "step_s": seconds / len(rows),
    }


def claims(found: Found) -> Iterator[Claim]:
    """That the chosen sizes are about as fast as the best fixed ones."""
    speed = {name: row["tokens_per_s"] for name, row in found.items() if "tokens_per_s" in row}
    chosen = speed.pop(CHOSEN, None)
    if chosen and speed:
        share = chosen / max(speed.values())
        yield Claim(f"chosen: {share:.2f} of the best fixed size (at least {BEST})", share >= BEST)


def sections(request: argparse.Namespace) -> list[Section]:
    """A row for the chosen sizes, and one for each fixed number of slots."""
    given = {"prompts": 4, "steps": 4} if request.quick else {"prompts": 24, "steps": 16}
    variants = (None, 8) if request.quick else (None, *FIXED)
    cost = 60 if request.quick else 120
    rows = [
        Row(f"{slots} slots" if slots else CHOSEN, tokens_a_second, {**given, "slots": slots}, cost)
        for slots in variants
    ]
    title = (
        "Trained tokens a second of the demo's steps but the first, with "
        f"{8 * given['prompts']} rollouts a step"
    )
    # What a small case measures is mostly its overhead.
    return [Section("trained", title, rows, () if request.quick else [claims])]
