"""What the sampler and the learner share to measure their compiled programs."""

from __future__ import annotations

import time
from collections.abc import Callable

from jax.sharding import Mesh

from pipeline.compute.model.vocabulary import Vocabulary


def fastest_s(
    work: Callable[[], object], *, repeats: int, before: Callable[[], None] | None = None
) -> float:
    """Seconds of the fastest of several runs after a warm-up; the others were delayed.

    Args:
        work: waits for its results.
        repeats: runs after the warm-up.
        before: runs before each of them, untimed.
    """
    seconds = []
    for _ in range(1 + repeats):
        if before is not None:
            before()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def device_name(mesh: Mesh) -> str:
    """Number and kind of the devices."""
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind}"


def plain_token(vocabulary: Vocabulary) -> int:
    """A token without a special meaning."""
    special = {vocabulary.pad, *vocabulary.stops, *vocabulary.forbidden}
    return next(token for token in range(len(special) + 1) if token not in special)
