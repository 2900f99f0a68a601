"""The order of training prompts: a pure function of seed and step, so a resume needs no cursor.

If the number of prompts per step varies, it is a function of seed and number of earlier prompts.

Each source iterates over its prompts in epochs; epochs follow each other without a gap, and a step
may span two epochs. The weights determine the number of prompts of each source in a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from pipeline.types import Prompt

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: its multiples modulo 2**64 are equidistributed (Weyl, 1916)."""


@dataclass(frozen=True)
class EpochBoundary:
    """Prompts of the step that spans the start of an epoch: before and after the start.

    Both are 0 if a step starts with the epoch.
    """

    before: int
    after: int


def prompts_for_step(
    prompts: Sequence[Prompt],
    *,
    seed: int,
    step: int,
    prompts_per_step: int,
    weights: Mapping[str, float] | None = None,
) -> tuple[Prompt, ...]:
    """The prompts of `step`, counted from 0.

    Every epoch of a source contains each of its prompts once, and no step contains a prompt twice.
    The number of a source's prompts in a step is its share rounded up or down, by systematic
    sampling (Madow & Madow, Ann. Math. Stat. 15, 1944) with equidistributed offsets, so that over
    many steps the shares equal the weights.

    Args:
        prompts: prompts of all sources; `source` is the source of each.
        seed: the run's seed.
        step: number of the step, from 0.
        prompts_per_step: number of prompts in a step.
        weights: share of each source, with sum 1; None or a single one without a mixture.

    Raises:
        ValueError: if a step needs more prompts than there are.
    """
    if weights is None or len(weights) < 2:
        _check_enough(prompts_per_step, len(prompts), "rollout.prompts_per_step", "data.train")
        chosen_indices = _one_source(len(prompts), seed=seed, step=step, per_step=prompts_per_step)
        return tuple(prompts[index] for index in chosen_indices)
    counts = _cumulative_counts(
        weights, seed=seed, steps=step + 2, prompts_per_step=prompts_per_step
    )
    chosen: list[Prompt] = []
    for number, name in enumerate(weights):
        own = _prompts_of(name, prompts)
        before = counts[:, number]
        count = int(before[step + 1] - before[step])
        _check_enough(count, len(own), f"step {step + 1}: the share of {name!r}", "that source")
        indices = _of_source(len(own), before, seed=_source_seed(seed, name), step=step)
        chosen += [own[index] for index in indices]
    return tuple(chosen)


def consecutive_prompts(
    prompts: Sequence[Prompt],
    *,
    seed: int,
    start: int,
    count: int,
    window: int,
    weights: Mapping[str, float] | None = None,
) -> tuple[Prompt, ...]:
    """`count` prompts from index `start` of an infinite sequence, for steps of varying size.

    Every epoch of a source contains each of its prompts once, and any `window` consecutive prompts
    are different. In a mixture the sources are interleaved evenly by their shares.

    Args:
        prompts: prompts of all sources; `source` is the source of each.
        seed: the run's seed.
        start: number of prompts used before.
        count: number of prompts, from 1 to `window`.
        window: maximum number of prompts in a step.
        weights: share of each source, with sum 1; None or a single one without a mixture.

    Raises:
        ValueError: if there are too few prompts; see `check_window`.
    """
    assert 1 <= count <= window
    check_window(prompts, window=window, weights=weights)
    if weights is None or len(weights) < 2:
        chosen_indices = _window(len(prompts), seed=seed, start=start, count=count, window=window)
        return tuple(prompts[index] for index in chosen_indices)
    # Treated as steps of a single prompt.
    counts = _cumulative_counts(weights, seed=seed, steps=start + count + 1, prompts_per_step=1)
    chosen: dict[int, Prompt] = {}
    for number, (name, share) in enumerate(weights.items()):
        own, before = _prompts_of(name, prompts), counts[start:, number]
        indices = _window(
            len(own),
            seed=_source_seed(seed, name),
            start=int(before[0]),
            count=int(before[-1] - before[0]),
            window=max_in_window(share, window),
        )
        positions = np.flatnonzero(np.diff(before))
        chosen |= {int(at): own[index] for at, index in zip(positions, indices, strict=True)}
    return tuple(chosen[at] for at in range(count))


def check_window(
    prompts: Sequence[Prompt], *, window: int, weights: Mapping[str, float] | None = None
) -> None:
    """Refuses a `window` so large that a step could contain a prompt twice.

    Raises:
        ValueError: with the number of prompts and the required number.
    """
    sources = {"data.train": (len(prompts), window)}
    if weights is not None and len(weights) > 1:
        sources = {
            f"source {name!r}": (len(_prompts_of(name, prompts)), max_in_window(share, window))
            for name, share in weights.items()
        }
    for name, (total, most) in sources.items():
        if 2 * (most - 1) > total:
            raise ValueError(
                f"rollout.max_prompts_per_step = {window} takes up to {most} prompts of {name} in "
                "a step, which may span two epochs; to contain no prompt twice it needs "
                f"{2 * (most - 1)} prompts, and there are {total}; set it lower"
            )


def max_in_window(share: float, window: int) -> int:
    """Maximum number of a source's prompts among `window` consecutive ones, given its share."""
    # The maximum number of the first `window` multiples of the golden ratio, as points on a circle,
    # that an arc of length `share` can contain.
    steps = np.arange(window, dtype=np.uint64) * np.uint64(_GOLDEN)
    points = np.sort(steps.astype(np.float64) / 2**64)
    twice = np.concatenate([points, points + 1])
    ends = np.searchsorted(twice, points + min(share, 1) + 1e-9, side="right")
    return int(min(window, (ends - np.arange(window)).max()))


def normalized_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights, normalized to sum 1."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def evenly_spaced(prompts: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
    """`count` evenly spaced prompts of a step, which keeps the shares of sources approximately."""
    assert 0 < count <= len(prompts), (count, len(prompts))
    return tuple(prompts[number * len(prompts) // count] for number in range(count))


def max_per_step(share: float, prompts_per_step: int) -> int:
    """Maximum number of a source's prompts in a step, given its share."""
    return ceil(share * prompts_per_step - 1e-9)


def shuffled_order(total: int, *, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `total` indices, int64 `total`, determined by seed and epoch."""
    # Sorts the raw stream of the bit generator, which NumPy keeps stable across versions, unlike
    # the stream of `Generator.permutation`.
    raw = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(total)
    return np.argsort(raw, kind="stable")


def _one_source(total: int, *, seed: int, step: int, per_step: int) -> np.ndarray:
    """Indices of the prompts of a step without a mixture; all steps take `per_step` prompts."""

    def boundary(epoch: int) -> EpochBoundary:
        before = epoch * total % per_step
        return EpochBoundary(before, per_step - before) if before else EpochBoundary(0, 0)

    return _slice(total, seed=seed, start=step * per_step, count=per_step, boundary=boundary)


def _of_source(total: int, before: np.ndarray, *, seed: int, step: int) -> np.ndarray:
    """Indices of a source's prompts in a step; steps before step n take `before[n]` prompts."""

    def boundary(epoch: int) -> EpochBoundary:
        begin = epoch * total
        after = int(np.searchsorted(before, begin))
        if before[after] == begin:
            return EpochBoundary(0, 0)
        return EpochBoundary(int(begin - before[after - 1]), int(before[after] - begin))

    start, count = int(before[step]), int(before[step + 1] - before[step])
    return _slice(total, seed=seed, start=start, count=count, boundary=boundary)


def _window(total: int, *, seed: int, start: int, count: int, window: int) -> np.ndarray:
    """`count` indices from index `start` of a sequence of which any `window` consecutive differ."""
    # Assumes that a step with any split of its prompts may span the start of each epoch, so the
    # order does not depend on the actual start of steps.
    edge = EpochBoundary(window - 1, window - 1)
    return _slice(
        total,
        seed=seed,
        start=start,
        count=count,
        boundary=lambda epoch: edge if epoch else EpochBoundary(0, 0),
    )


def _slice(
    total: int, *, seed: int, start: int, count: int, boundary: Callable[[int], EpochBoundary]
) -> np.ndarray:
    """`count` indices from index `start` of the infinite sequence of epochs."""
    epoch, start = divmod(start, total)
    order = _epoch_order(total, seed=seed, epoch=epoch, boundary=boundary)
    if start + count > total:
        following = _next_order(order, seed=seed, epoch=epoch, boundary=boundary(epoch + 1))
        order = np.concatenate([order, following])
    return order[start : start + count]


def _epoch_order(
    total: int, *, seed: int, epoch: int, boundary: Callable[[int], EpochBoundary]
) -> np.ndarray:
    """The order of an epoch's prompts, int64 `total`."""
    # An epoch's order depends on the end of the previous epoch if a step spans both. That end is
    # the shuffled one if the previous epoch starts with a step, or if it is so long that the steps
    # at its start and end share no prompts.
    first = epoch
    while boundary(first) != EpochBoundary(0, 0):
        first -= 1
        start, end = boundary(first), boundary(first + 1)
        if start.before + start.after + end.before <= total:
            break
    order = shuffled_order(total, seed=seed, epoch=first)
    for earlier in range(first, epoch):
        order = _next_order(order, seed=seed, epoch=earlier, boundary=boundary(earlier + 1))
    return order


def _next_order(order: np.ndarray, *, seed: int, epoch: int, boundary: EpochBoundary) -> np.ndarray:
    """The order of epoch `epoch + 1`, given the order of `epoch`.

    If a step spans both epochs, the prompts that it took from `epoch` move behind the step's end.
    """
    total = len(order)
    shuffled = shuffled_order(total, seed=seed, epoch=epoch + 1)
    if boundary.before == 0:
        return shuffled
    unused = ~np.isin(shuffled, order[total - boundary.before :])
    head = shuffled[unused][: boundary.after]
    return np.concatenate([head, shuffled[~np.isin(shuffled, head)]])


def _cumulative_counts(
    weights: Mapping[str, float], *, seed: int, steps: int, prompts_per_step: int
) -> np.ndarray:
    """Prompts of each source in the first n steps, int64 `steps source`, n from 0."""
    first = int.from_bytes(_digest(f"{seed}/mixture"), "little")
    multiples = np.arange(steps - 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(first)
    # Half a unit off, so that rounding errors of integer bounds never reach an offset.
    offsets = ((multiples >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
    bounds = np.cumsum(list(weights.values())) * prompts_per_step
    bounds[-1] = prompts_per_step
    # Point j of a step is at offset + j; a source gets the points between the previous bound and
    # its own.
    below = np.ceil(bounds[None, :] - offsets[:, None]).astype(np.int64)
    counts = np.diff(below, axis=1, prepend=0)
    return np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])


def _prompts_of(source: str, prompts: Sequence[Prompt]) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.source == source]


def _source_seed(seed: int, name: str) -> int:
    """The seed of a source, so that sources of equal size are shuffled differently."""
    return int.from_bytes(_digest(f"{seed}/{name}"), "little")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _check_enough(count: int, total: int, what: str, where: str) -> None:
    if count > total:
        raise ValueError(
            f"{what} = {count} is more than the {total} prompts of {where}; at most {total}"
        )
