"""What arrays and compiled programs take of a device's memory, by JAX's and the compiler's account.

The compiler's is kept against no device: a program that does not fit is refused by who is told a
limit, before it runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax

GIB = 2**30


class NoRoomError(MemoryError):
    """A program would take more than may be used.

    Attributes:
        share: of what it would take so much is there.
    """

    def __init__(self, what: str, share: float) -> None:
        super().__init__(what)
        self.share = share


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """Of each device while the program runs: arguments, results and temporaries."""
    stats: Any = compiled.memory_analysis()
    size: int = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    return size


def result_bytes(compiled: jax.stages.Compiled) -> int:
    """Of each device: what the program returns."""
    stats: Any = compiled.memory_analysis()
    size: int = stats.output_size_in_bytes
    return size


def array_bytes(arrays: Any) -> int:
    """Of each device: a tree of arrays, or of shapes with shardings."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(arrays)
    )


def resident_bytes() -> int:
    """Of this process's fullest device: all arrays that are there now."""
    held: dict[jax.Device, dict[int, int]] = defaultdict(dict)
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            # By address: reading an array on the host leaves a view of it behind.
            held[shard.device][shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return max((sum(sizes.values()) for sizes in held.values()), default=0)


def check_room(needs: Mapping[str, int], *, hbm_gib: float) -> None:
    """Refuses programs that have no room beside what is on the devices now.

    Args:
        needs: bytes of each device that a program takes beside those arrays, by its name.
        hbm_gib: what may be used of a device.

    Raises:
        NoRoomError: naming the largest program, and what it would need.
    """
    there, name = resident_bytes(), max(needs, key=lambda name: needs[name])
    room = hbm_gib * GIB - there
    if needs[name] > room:
        raise NoRoomError(
            f"{name} needs {needs[name] / GIB:.4g} GiB of each device beside {there / GIB:.4g} GiB "
            f"that are in use; plan.hbm_gib = {hbm_gib:g}",
            room / needs[name],
        )
