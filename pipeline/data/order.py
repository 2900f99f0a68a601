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
class Source:
    """A source of training prompts and its share of them.

    Its order has a seed of its own: sources of equal size are shuffled differently.
    """

    prompts: Sequence[Prompt]
    share: float
    seed: int


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
        prompts: prompts of all sources; `source` is the source of each. No source has fewer than
            its largest share of a step.
        seed: the run's seed.
        step: number of the step, from 0.
        prompts_per_step: number of prompts in a step.
        weights: share of each source, with sum 1; None or a single one without a mixture.
    """
    sources = _sources(prompts, weights, seed)
    counts = _cumulative_counts(
        sources, seed=seed, steps=step + 2, prompts_per_step=prompts_per_step
    )
    chosen: list[Prompt] = []
    for source, before in zip(sources.values(), counts.T, strict=True):
        indices = _of_step(len(source.prompts), before, seed=source.seed, step=step)
        chosen += [source.prompts[index] for index in indices]
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
        prompts: as `weights`, see `prompts_for_step`.
        seed: the run's seed.
        start: number of prompts used before.
        count: number of prompts, from 1 to `window`.
        window: maximum number of prompts in a step.
        weights: share of each source.

    Raises:
        ValueError: if there are too few prompts; see `check_window`.
    """
    assert 1 <= count <= window
    check_window(prompts, window=window, weights=weights)
    # Treated as steps of a single prompt.
    sources = _sources(prompts, weights, seed)
    counts = _cumulative_counts(sources, seed=seed, steps=start + count + 1, prompts_per_step=1)
    chosen: dict[int, Prompt] = {}
    for source, before in zip(sources.values(), counts[start:].T, strict=True):
        indices = _window(
            len(source.prompts),
            seed=source.seed,
            start=int(before[0]),
            count=int(before[-1] - before[0]),
            window=max_in_window(source.share, window),
        )
        positions = np.flatnonzero(np.diff(before))
        places = zip(positions, indices, strict=True)
        chosen |= {int(at): source.prompts[index] for at, index in places}
    return tuple(chosen[at] for at in range(count))


def check_window(
    prompts: Sequence[Prompt], *, window: int, weights: Mapping[str, float] | None = None
) -> None:
    """Refuses a `window` so large that a step could contain a prompt twice, with a ValueError."""
    for name, source in _sources(prompts, weights, 0).items():
        total, most = len(source.prompts), max_in_window(source.share, window)
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


def _sources(
    prompts: Sequence[Prompt], weights: Mapping[str, float] | None, seed: int
) -> dict[str, Source]:
    """The sources by what messages call them; without a mixture there is one."""
    if weights is None or len(weights) < 2:
        return {"data.train": Source(prompts, 1.0, seed)}
    found = {}
    for name, share in weights.items():
        own = [prompt for prompt in prompts if prompt.source == name]
        own_seed = int.from_bytes(_digest(f"{seed}/{name}"), "little")
        found[f"source {name!r}"] = Source(own, share, own_seed)
    return found


def _of_step(total: int, before: np.ndarray, *, seed: int, step: int) -> np.ndarray:
    """Indices of a source's prompts in a step; steps before step n take `before[n]` prompts."""

    def boundary(epoch: int) -> EpochBoundary:
        begin = epoch * total
        after = int(np.searchsorted(before, begin))
        if before[after] == begin:
            return EpochBoundary(0, 0)
        return EpochBoundary(int(begin - before[after - 1]), int(before[after] - begin))

    start, count = int(before[step]), int(before[step + 1] - before[step])
    assert count <= total, f"a step takes {count} of {total} prompts"
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
    sources: Mapping[str, Source], *, seed: int, steps: int, prompts_per_step: int
) -> np.ndarray:
    """Prompts of each source in the first n steps, int64 `steps source`, n from 0."""
    first = int.from_bytes(_digest(f"{seed}/mixture"), "little")
    multiples = np.arange(steps - 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(first)
    # Half a unit off, so that rounding errors of integer bounds never reach an offset.
    offsets = ((multiples >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
    bounds = np.cumsum([source.share for source in sources.values()]) * prompts_per_step
    bounds[-1] = prompts_per_step
    # Point j of a step is at offset + j; a source gets the points between the previous bound and
    # its own.
    below = np.ceil(bounds[None, :] - offsets[:, None]).astype(np.int64)
    counts = np.diff(below, axis=1, prepend=0)
    return np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
