"""Device memory: sizes of arrays and programs, the limit `plan.hbm_gib`, and out-of-memory errors.

Sizes of programs are the compiler's. It compiles without regard to other arrays; `check_fits`
refuses programs that do not fit beside them. JAX is imported inside functions, so that the driver
can import the actors that use this module.
"""

from __future__ import annotations

import gc
import math
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from configs.schema import Config
from pipeline.plan.sizes import WorkerPhase
from pipeline.plan.topology import GIB
from pipeline.protocols import MemoryUse, OutOfMemory
from pipeline.run.threads import first_line

if TYPE_CHECKING:
    import jax

T = TypeVar("T")


class DeviceMemoryError(MemoryError):
    """A program would exceed the memory limit.

    Attributes:
        share: available memory as a share of what the program needs.
    """

    def __init__(self, what: str, share: float) -> None:
        super().__init__(what)
        self.share = share


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes per device while the program runs: arguments, results and temporaries."""
    stats: Any = compiled.memory_analysis()
    size: int = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    return size


def argument_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes per device of the arguments that the program reads; JAX drops the others."""
    stats: Any = compiled.memory_analysis()
    size: int = stats.argument_size_in_bytes
    return size


def result_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes per device of the program's results."""
    stats: Any = compiled.memory_analysis()
    size: int = stats.output_size_in_bytes
    return size


def array_bytes(arrays: Any) -> int:
    """Bytes of a device's memory of a tree of arrays, or of shapes with shardings."""
    import jax

    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(arrays)
        if _is_on_device(array.sharding)
    )


def _is_on_device(sharding: jax.sharding.Sharding) -> bool:
    """Whether arrays are in a device's memory; a CPU's is the host's."""
    devices: set[Any] = sharding.device_set
    on_cpu = any(device.platform == "cpu" for device in devices)
    return on_cpu or sharding.memory_kind != "pinned_host"


def resident_bytes() -> int:
    """Bytes of all live arrays on this process's fullest device."""
    import jax

    held: dict[jax.Device, dict[int, int]] = defaultdict(dict)
    for array in filter(lambda array: _is_on_device(array.sharding), jax.live_arrays()):
        for shard in array.addressable_shards:
            # By address: reading an array on the host leaves a view of it.
            held[shard.device][shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return max((sum(sizes.values()) for sizes in held.values()), default=0)


def check_fits(needs: Mapping[str, int], config: Config) -> None:
    """Refuses programs that do not fit together with the live arrays.

    Args:
        needs: bytes per device that a program needs besides the live arrays, by its name.
        config: the limit is `plan.hbm_gib`, and the devices' memory where they report it.

    Raises:
        DeviceMemoryError: naming the largest program and its need.
    """
    import jax

    limits = {} if config.plan.hbm_gib is None else {"plan.hbm_gib": config.plan.hbm_gib * GIB}
    for device in jax.local_devices():
        if (size := (device.memory_stats() or {}).get("bytes_limit")) is not None:
            limits[f"the memory of {device.device_kind}"] = size
    if not limits:
        return
    resident, name = resident_bytes(), max(needs, key=lambda name: needs[name])
    what = min(limits, key=lambda what: limits[what])
    available = limits[what] - resident
    if needs[name] > available:
        raise DeviceMemoryError(
            f"{name} needs {needs[name] / GIB:.4g} GiB of each device beside "
            f"{resident / GIB:.4g} GiB that are in use; {what} is {limits[what] / GIB:.4g} GiB",
            available / needs[name],
        )


def memory_use(needs: Mapping[str, int]) -> MemoryUse:
    """Memory use of this process.

    Args:
        needs: bytes per device that a program needs besides the live arrays, by its name.
    """
    import jax

    resident = resident_bytes()
    compiled = resident + max(needs.values()) if needs else None
    measured = (device.memory_stats() for device in jax.local_devices())
    peaks = [stats["peak_bytes_in_use"] for stats in measured if stats]
    return MemoryUse(compiled, resident, max(peaks, default=None))


def catch_out_of_memory(phase: WorkerPhase, work: Callable[[], T]) -> T:
    """The result of `work`; converts an out-of-memory error and frees what `work` allocated.

    Raises:
        OutOfMemory: if `work` ran out of memory.
    """
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        what, share = first_line(error), getattr(error, "share", None)
        # The traceback's frames hold caches, gradients and batches while the error lives.
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    # Outside of `except`: otherwise the original error would be the context of this one.
    raise OutOfMemory(phase, what, share)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether JAX (device or compiler), Python or NumPy reports a lack of memory."""
    import jax

    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError)
