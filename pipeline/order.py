"""Which prompts a step learns from: a pure function of seed and step, so a resume needs no cursor.

Epochs follow each other without a gap; a step may span two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np

from pipeline.datatypes import Prompt


def prompts_for_step(
    prompts: Sequence[Prompt], *, seed: int, step: int, prompts_per_step: int
) -> tuple[Prompt, ...]:
    """The prompts of `step`, counted from 0.

    Every epoch holds each prompt once, and no step holds a prompt twice.

    Raises:
        ValueError: if a step needs more prompts than there are.
    """
    total = len(prompts)
    if prompts_per_step > total:
        raise ValueError(
            f"rollout.prompts_per_step = {prompts_per_step} is more than the {total} prompts of "
            f"data.train; at most {total}"
        )
    epoch, start = divmod(step * prompts_per_step, total)
    order = _epoch_order(total, seed=seed, epoch=epoch, per_step=prompts_per_step)
    if start + prompts_per_step > total:
        following = _after(order, seed=seed, epoch=epoch, per_step=prompts_per_step)
        order = np.concatenate([order, following])
    return tuple(prompts[index] for index in order[start : start + prompts_per_step])


def _epoch_order(total: int, *, seed: int, epoch: int, per_step: int) -> np.ndarray:
    """The order of an epoch's prompts, int64 `total`."""
    # An epoch's order depends on the last one's where a step spans both, and on none before an
    # epoch that begins with a step.
    period = per_step // gcd(per_step, total)
    first = epoch - epoch % period
    order = shuffled(total, seed=seed, epoch=first)
    for before in range(first, epoch):
        order = _after(order, seed=seed, epoch=before, per_step=per_step)
    return order


def _after(order: np.ndarray, *, seed: int, epoch: int, per_step: int) -> np.ndarray:
    """The order of the epoch after `epoch`, whose order is given.

    Where a step spans both epochs, the prompts it already has move behind it in the new one.
    """
    total = len(order)
    shuffled = shuffled(total, seed=seed, epoch=epoch + 1)
    begun = (epoch + 1) * total % per_step
    if begun == 0:
        return shuffled
    fresh = ~np.isin(shuffled, order[total - begun :])
    head = shuffled[fresh][: per_step - begun]
    return np.concatenate([head, shuffled[~np.isin(shuffled, head)]])


def shuffled(total: int, *, seed: int, epoch: int) -> np.ndarray:
    """An order of `total` things, int64 `total`: the same for the same seed and epoch."""
    # Sorting the raw stream of the bit generator: NumPy promises that stream across versions, and
    # does not promise that of `Generator.permutation`.
    raw = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(total)
    return np.argsort(raw, kind="stable")
