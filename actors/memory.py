"""The boundary at which running out of memory becomes a value. Used inside actors only."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import TypeVar

from pipeline.plan.out_of_memory import OutOfMemory
from pipeline.plan.sizes import Phase

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


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
