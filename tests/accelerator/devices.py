"""What the chips compute other than the model's programs: collectives, checkpoint, speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pipeline.compute.learner.timing import fastest_s
from pipeline.compute.model.sharding import make_mesh, replicated

_COLUMNS = 128
_LOOPS = 64
"""Repetitions inside a timed program, which hide the time of its start."""
_ADDED, _FACTORS = 2**28, 8192
"""Float32 numbers of the timed sum, 1 GiB, and rows of the multiplied matrices."""


def exchanged(chips: Sequence[jax.Device], size: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Results of collectives inside groups of `size` chips, and what NumPy computes.

    Each chip has other numbers, so that a chip left out, taken twice, or in another place shows.
    """
    mesh = Mesh(
        np.asarray(chips).reshape(-1, size), ("group", "chip"), axis_types=(AxisType.Auto,) * 2
    )
    numbers = np.random.default_rng(0).integers(-1000, 1000, (len(chips), size, _COLUMNS))
    given = numbers.astype(np.float32)
    by_chip = PartitionSpec(("group", "chip"))
    x = jax.device_put(given, NamedSharding(mesh, by_chip))
    ring = [(one, (one + 1) % size) for one in range(size)]
    work: Mapping[str, Callable[[jax.Array], jax.Array]] = {
        "sum": lambda x: jax.lax.psum(x, "chip"),
        "gather": lambda x: jax.lax.all_gather(x[0, 0], "chip")[None],
        "scatter": lambda x: jax.lax.psum_scatter(x, "chip", scatter_dimension=1),
        "shift": lambda x: jax.lax.ppermute(x, "chip", ring),
    }
    grouped = given.reshape(-1, size, size, _COLUMNS)
    total = grouped.sum(axis=1)
    wanted = {
        "sum": np.repeat(total, size, axis=0),
        "gather": np.repeat(grouped[:, :, 0], size, axis=0),
        "scatter": total.reshape(-1, _COLUMNS),
        "shift": np.roll(grouped, 1, axis=1).reshape(given.shape),
    }
    found = {}
    for name, function in work.items():
        program = jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=by_chip, out_specs=by_chip, check_vma=False)
        )
        result = np.asarray(program(x)).reshape(wanted[name].shape)
        found[name] = (result, wanted[name])
    return found


@dataclass(frozen=True)
class Rates:
    """Measured speed of a chip while all chips work.

    Attributes:
        bytes_per_s: bytes that are read from and written to its memory.
        bf16_flops: operations of a bfloat16 product.
        int8_flops: operations of an 8-bit product.
    """

    bytes_per_s: float
    bf16_flops: float
    int8_flops: float


def measured(chips: Sequence[jax.Device]) -> Rates:
    """Measures the chips, all at the same time, so the slowest one decides."""
    rng = np.random.default_rng(0)
    signs = rng.choice(np.asarray([-1, 1], np.int8), (_FACTORS, _FACTORS))
    floats = (signs / np.sqrt(_FACTORS)).astype(jnp.bfloat16)  # products are as large as factors
    operations = 2.0 * _FACTORS**3

    def multiply_int8(x: jax.Array, y: jax.Array) -> jax.Array:
        wide = jnp.dot(x, y, preferred_element_type=jnp.int32)
        return wide.astype(jnp.int8)  # its low bits, which are as random as the factors

    add_s = _loop_s(chips, jnp.add, np.zeros(_ADDED, np.float32), np.float32(1))
    return Rates(
        bytes_per_s=2 * 4 * _ADDED / add_s,
        bf16_flops=operations / _loop_s(chips, jnp.dot, floats, floats),
        int8_flops=operations / _loop_s(chips, multiply_int8, signs, signs),
    )


def _loop_s(
    chips: Sequence[jax.Device],
    work: Callable[[jax.Array, jax.Array], jax.Array],
    first: np.ndarray,
    second: np.ndarray | np.generic,
) -> float:
    """Seconds of `work` on every chip at once; its result becomes the first argument."""
    mesh, whole = make_mesh(chips), PartitionSpec()

    def loop(first: jax.Array, second: jax.Array) -> jax.Array:
        # Two at a time: one's result can replace its argument only after the next one, so with one
        # XLA would copy it.
        return jax.lax.fori_loop(0, _LOOPS, lambda _, x: work(x, second), first, unroll=2)

    program = jax.jit(
        jax.shard_map(loop, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    )
    given = jax.device_put((first, second), replicated(mesh))
    return fastest_s(lambda: jax.block_until_ready(program(*given))) / _LOOPS
