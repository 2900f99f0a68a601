"""The device mesh and its shardings: replicated, by batch row, base weights.

Mesh axes are (data, fsdp, tp). Rows of a batch are sharded over data and fsdp, base weights over
fsdp and tp, per-layer embeddings over all of them; adapter and optimizer state are small and
replicated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pipeline.data.models import model_shape

DATA = "data"
"""Mesh axis over which only batch rows are sharded."""
FSDP = model_shape.FSDP
"""Mesh axis over which batch rows and weights are sharded; weights are gathered layer by layer."""
TP = model_shape.TP
"""Mesh axis over which heads, feed-forward width and vocabulary are sharded, also in compute."""
BATCH_AXES = (DATA, FSDP)
"""Mesh axes over which batch rows are sharded, outermost first."""
VOCAB_AXES = (FSDP, TP)
"""Mesh axes over which rows of the tied embedding are sharded, outermost first."""


ALL_AXES = (DATA, FSDP, TP)
"""Mesh axes over which rows of the per-layer embeddings are sharded, outermost first."""
HOST_MEMORY = "pinned_host"
"""JAX's name of the host memory that devices can copy from."""

_EMBEDDING = "embedder"
_AXES: Mapping[str, tuple[str | tuple[str, ...] | None, ...]] = {
    _EMBEDDING: (VOCAB_AXES, None),
    "per_layer_embedder": (ALL_AXES, None),
    **model_shape.MATRIX_AXES,
}
"""Mesh axes of each axis of a matrix, by path of its module; other parameters are replicated."""


def make_mesh(devices: Sequence[jax.Device], *, fsdp: int = 1, tp: int = 1) -> Mesh:
    """A mesh with axes data, fsdp, tp over `devices`; data has the remaining devices.

    Raises:
        ValueError: if `fsdp * tp` does not divide the number of devices.
    """
    if len(devices) % (fsdp * tp):
        raise ValueError(
            f"fsdp x tp = {fsdp} x {tp} must divide the number of devices, which is {len(devices)}"
        )
    grid = np.asarray(devices).reshape(-1, fsdp, tp)
    return Mesh(grid, (*BATCH_AXES, TP), axis_types=(AxisType.Auto,) * 3)


def platform(mesh: Mesh) -> str:
    """Platform of its devices: "cpu", "gpu" or "tpu"."""
    return mesh.devices.flat[0].platform


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def by_row(mesh: Mesh) -> NamedSharding:
    """The leading axis (`rows`) is sharded over the mesh's batch axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def by_row_and_head(mesh: Mesh, *, kv_heads: int) -> NamedSharding:
    """Sharding of `rows kv_heads ...`: rows as in `by_row`, kv heads over tp if it divides them.

    A device stores the keys and values that it computes.
    """
    heads = TP if kv_heads % mesh.shape[TP] == 0 else None
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, heads))


def in_host(mesh: Mesh) -> NamedSharding:
    """The whole array in host memory, once for each device."""
    return replicated(mesh).with_memory_kind(HOST_MEMORY)


def parameter_sharding(name: str, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Sharding of a base parameter.

    An axis that its mesh axes do not divide is replicated, such as one kv head under tp.

    Args:
        name: its path; for a quantized one, the path of codes or scale.
        shape: its shape; codes and scale have the axes of the matrix.
        mesh: with axes `DATA`, `FSDP` and `TP`.

    Raises:
        ValueError: if the mesh does not divide the embedding's rows evenly.
    """
    matrix = "/".join(name.split(".array.", maxsplit=1)[0].split(".")[-3:-1])
    if matrix not in _AXES:
        return replicated(mesh)
    spec = [
        axis if axis is not None and size % _parts(axis, mesh) == 0 else None
        for axis, size in zip(_AXES[matrix], shape, strict=True)
    ]
    if matrix == _EMBEDDING and spec[0] is None:
        raise ValueError(
            f"fsdp x tp = {mesh.shape[FSDP]} x {mesh.shape[TP]} (plan.fsdp, plan.tp; of split "
            f"samplers plan.sampler_tp) must divide the vocabulary of {shape[0]} entries"
        )
    return NamedSharding(mesh, PartitionSpec(*spec))


def gathered_sharding(name: str, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Sharding of a base parameter while its layer computes: gathered along fsdp."""
    spec = parameter_sharding(name, shape, mesh).spec
    return NamedSharding(mesh, PartitionSpec(*(None if axis == FSDP else axis for axis in spec)))


def placed(
    shapes: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of base parameters with their `parameter_sharding`."""
    return {
        name: shape.update(sharding=parameter_sharding(name, shape.shape, mesh))
        for name, shape in shapes.items()
    }


def _parts(axes: str | tuple[str, ...], mesh: Mesh) -> int:
    names = (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)


def batch_shards(mesh: Mesh) -> int:
    """Number of shards of the rows of a batch."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def lowered(traced: jax.stages.Traced, mesh: Mesh) -> jax.stages.Lowered:
    """Lowers for the mesh's platform, which need not be on this machine."""
    kind = platform(mesh)
    # The platform is named "gpu" for devices and "cuda" for lowering.
    return traced.lower(lowering_platforms=("cuda" if kind == "gpu" else kind,))
