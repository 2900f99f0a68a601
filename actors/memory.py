"""Memory of a process: the boundary at which running out of it becomes a value, and what is used.

Used inside actors only.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

from pipeline.contracts.memory import MemoryUse, OutOfMemory
from pipeline.contracts.sizes import Phase

T = TypeVar("T")


def guarded(phase: Phase, work: Callable[[], T]) -> T:
    """The result of `work`; what it held when it ran out of memory is free afterwards.

    Raises:
        OutOfMemory: if it ran out of memory.
    """
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        what, share = _first_line(error), getattr(error, "share", None)
        # The frames hold caches, gradients and batches for as long as the error lives.
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    # Not inside `except`: this error would carry the other one along.
    raise OutOfMemory(phase, what, share)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says so: JAX about a device or the compiler about a program, Python, NumPy."""
    import jax

    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError)


def memory_use(needs: Mapping[str, int]) -> MemoryUse:
    """What this process holds.

    Args:
        needs: bytes of each device that a program takes beside the arrays that are there now, by
            its name.
    """
    import jax

    from pipeline.compute.model.footprint import resident_bytes

    there = resident_bytes()
    programs = {name: there + size for name, size in needs.items()}
    told = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    if not told:
        return MemoryUse(programs)
    fullest = max(told, key=lambda stats: stats["peak_bytes_in_use"])
    return MemoryUse(programs, fullest["peak_bytes_in_use"], fullest.get("bytes_limit"))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
