"""The device mesh and the three placements in use: replicated, sharded by batch row, on one host.

The base is replicated and only the batch is sharded: for a 1B model an 8-way split of the weights
costs five times the memory that it saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA = "data"
"""Name of the mesh axis over which batch rows are sharded."""


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A one-dimensional mesh over `devices`."""
    return Mesh(np.asarray(devices), (DATA,), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def by_row(mesh: Mesh) -> NamedSharding:
    """The leading axis (`batch`) is split over the mesh."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def build(traced: jax.stages.Traced, mesh: Mesh) -> jax.stages.Compiled:
    """Compiles for the mesh's kind of device, which need not be on this machine."""
    kind = mesh.devices.flat[0].platform
    # JAX calls the devices "gpu" and the compiler's target "cuda".
    return traced.lower(lowering_platforms=("cuda" if kind == "gpu" else kind,)).compile()


def rows_per_device(rows: int, mesh: Mesh) -> int:
    """Rows of a batch that one device holds."""
    assert rows % mesh.size == 0, (rows, mesh.size)
    return rows // mesh.size
