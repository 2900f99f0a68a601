"""TPU v5e topologies that the TPU compiler can compile for without a TPU."""

from __future__ import annotations

import difflib
import math

TPU_COMPILER = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment in which libtpu compiles for a v5e-8 without one; set before JAX is imported."""

HOST = "v5e:2x4"
"""The host whose first chips programs are compiled for; libtpu has no description of its parts."""

TOPOLOGIES = ("v5e:1x1", "v5e:2x2", HOST)
"""Topologies to compile for: one, four and eight chips of a host."""

GIB = 2**30
HBM_GIB = 15.75
"""Memory of a v5e chip that a program may use, as the compiler reports it."""


def chip_count(topology: str) -> int:
    """Number of chips of a topology.

    Raises:
        ValueError: if it cannot be compiled for.
    """
    if topology not in TOPOLOGIES:
        nearest = difflib.get_close_matches(topology, TOPOLOGIES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"topology {topology!r}: programs are compiled for "
            f"{', '.join(TOPOLOGIES)}; nearest: {nearest}"
        )
    return math.prod(int(size) for size in topology.split(":")[1].split("x"))
