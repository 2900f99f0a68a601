"""`python -m launch.bench balance`: the sizes that a run chooses beside fixed ones.

Runs of `launch.train` on the demo, one after the other, with a learning rate that changes nothing:
rollouts are drawn by their names, so all runs sample and train on the same tokens. Each size has
two runs, the second ones in reverse order, of which the faster counts: other programs only slow a
run.
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
"""Smallest allowed share of the best fixed size's speed."""
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
    speed = dict[str, float]()
    for name, row in found.items():
        if "tokens_per_s" in row:
            size = name.split(",")[0]
            speed[size] = max(speed.get(size, 0.0), row["tokens_per_s"])
    chosen = speed.pop(CHOSEN, None)
    if chosen and speed:
        share = chosen / max(speed.values())
        yield Claim(f"chosen: {share:.2f} of the best fixed size (at least {BEST})", share >= BEST)


def sections(request: argparse.Namespace) -> list[Section]:
    """Rows for the chosen sizes, and for each fixed number of slots."""
    given = {"prompts": 4, "steps": 4} if request.quick else {"prompts": 24, "steps": 16}
    once, cost = ([None, 8], 60) if request.quick else ([None, *FIXED], 120)
    turns = [once] if request.quick else [once, once[::-1]]
    rows = [
        Row(
            f"{f'{slots} slots' if slots else CHOSEN}, {turn}",
            tokens_a_second,
            {**given, "slots": slots},
            cost,
        )
        for turn, variants in enumerate(turns, 1)
        for slots in variants
    ]
    title = (
        "Trained tokens a second of the demo's steps but the first, with "
        f"{8 * given['prompts']} rollouts a step"
    )
    # What a small case measures is mostly its overhead.
    return [Section("trained", title, rows, () if request.quick else [claims])]
