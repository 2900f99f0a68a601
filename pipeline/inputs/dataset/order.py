"""Which prompts a step learns from: a pure function of seed and step, so a resume needs no cursor.

Where steps take as many as they need it is one of seed and of how many were drawn before.

Each source goes through its prompts epoch by epoch; epochs follow each other without a gap, and a
step may span two of them. How many prompts of a step come from which source follows the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from pipeline.contracts.rollouts import Prompt

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: its multiples, mod 2**64, are spread as evenly as can be (Weyl, 1916)."""


@dataclass(frozen=True)
class Spanning:
    """The step that spans the beginning of an epoch: its prompts before and after it.

    Both are 0 where a step begins with the epoch.
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

    Every epoch of a source holds each of its prompts once, and no step holds a prompt twice. Of
    each source a step holds the whole number below or above its share, by systematic sampling
    (Madow & Madow, Ann. Math. Stat. 15, 1944) with evenly spread offsets, so that over many steps
    the shares are the weights.

    Args:
        prompts: of all sources; a prompt's `source` says which it is from.
        seed: of the run.
        step: which one.
        prompts_per_step: how many.
        weights: share of each source, which sum to 1; None or a single one: there is one source.

    Raises:
        ValueError: if a step needs more prompts than there are.
    """
    if weights is None or len(weights) < 2:
        _check_enough(prompts_per_step, len(prompts), "rollout.prompts_per_step", "data.train")
        drawn = _one_source(len(prompts), seed=seed, step=step, per_step=prompts_per_step)
        return tuple(prompts[index] for index in drawn)
    taken = _taken_before(weights, seed=seed, steps=step + 2, prompts_per_step=prompts_per_step)
    chosen: list[Prompt] = []
    for number, name in enumerate(weights):
        own = _of(name, prompts)
        before = taken[:, number]
        count = int(before[step + 1] - before[step])
        _check_enough(count, len(own), f"step {step + 1}: the share of {name!r}", "that source")
        drawn = _of_source(len(own), before, seed=_source_seed(seed, name), step=step)
        chosen += [own[index] for index in drawn]
    return tuple(chosen)


def continued_prompts(
    prompts: Sequence[Prompt],
    *,
    seed: int,
    start: int,
    count: int,
    window: int,
    weights: Mapping[str, float] | None = None,
) -> tuple[Prompt, ...]:
    """`count` prompts from place `start` of one endless row, for steps that take what they need.

    Every epoch of a source holds each of its prompts once, and any `window` prompts that follow
    one another differ. In a mixture the sources take turns, spread evenly, in their shares.

    Args:
        prompts: of all sources; a prompt's `source` says which it is from.
        seed: of the run.
        start: how many were drawn before.
        count: how many, from 1 to `window`.
        window: the most that a step may draw.
        weights: share of each source, which sum to 1; None or a single one: there is one source.

    Raises:
        ValueError: if there are too few prompts for that; see `check_window`.
    """
    assert 1 <= count <= window
    check_window(prompts, window=window, weights=weights)
    if weights is None or len(weights) < 2:
        drawn = _window(len(prompts), seed=seed, start=start, count=count, window=window)
        return tuple(prompts[index] for index in drawn)
    # As steps of a single prompt.
    taken = _taken_before(weights, seed=seed, steps=start + count + 1, prompts_per_step=1)[start:]
    chosen: dict[int, Prompt] = {}
    for number, (name, share) in enumerate(weights.items()):
        own, before = _of(name, prompts), taken[:, number]
        drawn = _window(
            len(own),
            seed=_source_seed(seed, name),
            start=int(before[0]),
            count=int(before[-1] - before[0]),
            window=most_in_a_row(share, window),
        )
        places = np.flatnonzero(np.diff(before))
        chosen |= {int(place): own[index] for place, index in zip(places, drawn, strict=True)}
    return tuple(chosen[place] for place in range(count))


def check_window(
    prompts: Sequence[Prompt], *, window: int, weights: Mapping[str, float] | None = None
) -> None:
    """Refuses steps that may draw so many prompts that one could come twice.

    Raises:
        ValueError: naming how many prompts there are and how many there would have to be.
    """
    sources = {"data.train": (len(prompts), window)}
    if weights is not None and len(weights) > 1:
        sources = {
            f"source {name!r}": (len(_of(name, prompts)), most_in_a_row(share, window))
            for name, share in weights.items()
        }
    for name, (total, most) in sources.items():
        if 2 * (most - 1) > total:
            raise ValueError(
                f"rollout.max_prompts_per_step = {window} takes up to {most} prompts of {name} in "
                "a step; neither in an epoch nor where two of them meet may one come twice, so "
                f"there have to be {2 * (most - 1)} and there are {total}; set it lower"
            )


def most_in_a_row(share: float, window: int) -> int:
    """The most prompts that `window` of a mixture's row may hold of a source with this share."""
    # The most of so many multiples of the golden ratio that an arc of the circle may hold.
    steps = np.arange(window, dtype=np.uint64) * np.uint64(_GOLDEN)
    points = np.sort(steps.astype(np.float64) / 2**64)
    twice = np.concatenate([points, points + 1])
    behind = np.searchsorted(twice, points + min(share, 1) + 1e-9, side="right")
    return int(min(window, (behind - np.arange(window)).max()))


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights, made to sum to 1."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def spread(prompts: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
    """So many of a step's prompts, evenly spread, so that sources keep about their shares."""
    assert 0 < count <= len(prompts), (count, len(prompts))
    return tuple(prompts[place * len(prompts) // count] for place in range(count))


def most_of_a_source(share: float, prompts_per_step: int) -> int:
    """The most prompts that a step may hold of a source with this share."""
    return ceil(share * prompts_per_step - 1e-9)


def shuffled_order(total: int, *, seed: int, epoch: int) -> np.ndarray:
    """An order of `total` things, int64 `total`: the same for the same seed and epoch."""
    # Sorting the raw stream of the bit generator: NumPy promises that stream across versions, and
    # does not promise that of `Generator.permutation`.
    raw = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(total)
    return np.argsort(raw, kind="stable")


def _one_source(total: int, *, seed: int, step: int, per_step: int) -> np.ndarray:
    """Indices of the prompts of a step that takes `per_step`, as every other does."""

    def spanning(epoch: int) -> Spanning:
        before = epoch * total % per_step
        return Spanning(before, per_step - before) if before else Spanning(0, 0)

    return _slice(total, seed=seed, start=step * per_step, count=per_step, spanning=spanning)


def _of_source(total: int, before: np.ndarray, *, seed: int, step: int) -> np.ndarray:
    """Indices of the prompts of a step; `before[n]` are taken by the steps before step n."""

    def spanning(epoch: int) -> Spanning:
        begin = epoch * total
        after = int(np.searchsorted(before, begin))
        if before[after] == begin:
            return Spanning(0, 0)
        return Spanning(int(begin - before[after - 1]), int(before[after] - begin))

    start, count = int(before[step]), int(before[step + 1] - before[step])
    return _slice(total, seed=seed, start=start, count=count, spanning=spanning)


def _window(total: int, *, seed: int, start: int, count: int, window: int) -> np.ndarray:
    """`count` indices from place `start` of a source's row of which any `window` differ."""
    # As if at each beginning of an epoch a step could stand that has all but one prompt before it,
    # or all but one behind: so the order does not depend on where steps really begin.
    edge = Spanning(window - 1, window - 1)
    return _slice(
        total,
        seed=seed,
        start=start,
        count=count,
        spanning=lambda epoch: edge if epoch else Spanning(0, 0),
    )


def _slice(
    total: int, *, seed: int, start: int, count: int, spanning: Callable[[int], Spanning]
) -> np.ndarray:
    """`count` indices from place `start` of the endless row of epochs."""
    epoch, start = divmod(start, total)
    order = _epoch_order(total, seed=seed, epoch=epoch, spanning=spanning)
    if start + count > total:
        after = _after(order, seed=seed, epoch=epoch, spanning=spanning(epoch + 1))
        order = np.concatenate([order, after])
    return order[start : start + count]


def _epoch_order(
    total: int, *, seed: int, epoch: int, spanning: Callable[[int], Spanning]
) -> np.ndarray:
    """The order of an epoch's prompts, int64 `total`."""
    # An epoch's order depends on the end of the last one's where a step spans both. That end is as
    # it was shuffled where an epoch begins with a step, or is long enough for two of them.
    first = epoch
    while spanning(first) != Spanning(0, 0):
        first -= 1
        ahead, behind = spanning(first), spanning(first + 1)
        if ahead.before + ahead.after + behind.before <= total:
            break
    order = shuffled_order(total, seed=seed, epoch=first)
    for before in range(first, epoch):
        order = _after(order, seed=seed, epoch=before, spanning=spanning(before + 1))
    return order


def _after(order: np.ndarray, *, seed: int, epoch: int, spanning: Spanning) -> np.ndarray:
    """The order of the epoch after `epoch`, whose order is given.

    Where a step spans both epochs, the prompts it already has move behind it in the new one.
    """
    total = len(order)
    shuffled = shuffled_order(total, seed=seed, epoch=epoch + 1)
    if spanning.before == 0:
        return shuffled
    fresh = ~np.isin(shuffled, order[total - spanning.before :])
    head = shuffled[fresh][: spanning.after]
    return np.concatenate([head, shuffled[~np.isin(shuffled, head)]])


def _taken_before(
    weights: Mapping[str, float], *, seed: int, steps: int, prompts_per_step: int
) -> np.ndarray:
    """Prompts that the first n steps take of each source, int64 `steps source`, n from 0."""
    first = int.from_bytes(_digest(f"{seed}/mixture"), "little")
    multiples = np.arange(steps - 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(first)
    # Half a unit off, so that no bound that should be a whole number meets an offset by rounding.
    offsets = ((multiples >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
    bounds = np.cumsum(list(weights.values())) * prompts_per_step
    bounds[-1] = prompts_per_step
    # Point j of a step lies at offset + j; a source has those between its bound and the last one.
    below = np.ceil(bounds[None, :] - offsets[:, None]).astype(np.int64)
    counts = np.diff(below, axis=1, prepend=0)
    return np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])


def _of(source: str, prompts: Sequence[Prompt]) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.source == source]


def _source_seed(seed: int, name: str) -> int:
    """A seed for each source: equally long ones must not be shuffled alike."""
    return int.from_bytes(_digest(f"{seed}/{name}"), "little")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _check_enough(count: int, total: int, what: str, where: str) -> None:
    if count > total:
        raise ValueError(
            f"{what} = {count} is more than the {total} prompts of {where}; at most {total}"
        )
