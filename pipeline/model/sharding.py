"""The device mesh and the placements in use on it: replicated, by batch row.

Axes are (data, fsdp, tp). Rows of a batch are split over data and fsdp together; base weights over
fsdp and tp; adapter and optimizer state are small and replicated.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA = "data"
"""Mesh axis over which batch rows alone are sharded."""
FSDP = "fsdp"
"""Mesh axis over which batch rows and weights are sharded; weights are gathered layer by layer."""
TP = "tp"
"""Mesh axis over which heads, feed-forward width and vocabulary are sharded, also in compute."""
BATCH_AXES = (DATA, FSDP)
"""Mesh axes over which batch rows are sharded, outermost first."""
VOCAB_AXES = (FSDP, TP)
"""Mesh axes over which rows of the tied embedding are sharded, outermost first."""


def make_mesh(devices: Sequence[jax.Device], *, fsdp: int = 1, tp: int = 1) -> Mesh:
    """A mesh of axes data, fsdp, tp over `devices`; data takes what the other two leave.

    Raises:
        ValueError: if `fsdp * tp` does not divide the number of devices.
    """
    if len(devices) % (fsdp * tp):
        raise ValueError(
            f"fsdp x tp = {fsdp} x {tp} must divide the number of devices, which is {len(devices)}"
        )
    grid = np.asarray(devices).reshape(-1, fsdp, tp)
    return Mesh(grid, (*BATCH_AXES, TP), axis_types=(AxisType.Auto,) * 3)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def by_row(mesh: Mesh) -> NamedSharding:
    """The leading axis (`rows`) is split over the mesh's batch axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def batch_shards(mesh: Mesh) -> int:
    """Parts into which the rows of a batch are split."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def rows_per_device(rows: int, mesh: Mesh) -> int:
    """Rows of a batch that one device holds."""
    shards = batch_shards(mesh)
    assert rows % shards == 0, (rows, shards)
    return rows // shards


def build(traced: jax.stages.Traced, mesh: Mesh) -> jax.stages.Compiled:
    """Compiles for the mesh's kind of device, which need not be on this machine."""
    kind = mesh.devices.flat[0].platform
    # JAX calls the devices "gpu" and the compiler's target "cuda".
    return traced.lower(lowering_platforms=("cuda" if kind == "gpu" else kind,)).compile()
