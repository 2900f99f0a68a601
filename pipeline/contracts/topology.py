"""TPU v5e chips that need not be there: which of them the compiler can be asked about, and how."""

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
"""Environment in which libtpu compiles for a v5e-8 without one; before JAX is imported."""

HOST = "v5e:2x4"
"""The host whose first chips programs are compiled for; libtpu describes no part of one."""

TOPOLOGIES = ("v5e:1x1", "v5e:2x2", HOST)
"""What can be asked about: one, four and eight chips of a host."""

GIB = 2**30
HBM_GIB = 15.75
"""What a program may hold of a v5e chip, by the compiler's own account."""


def chip_count(topology: str) -> int:
    """How many chips a topology has.

    Raises:
        ValueError: if nothing can be compiled for it here.
    """
    if topology not in TOPOLOGIES:
        nearest = difflib.get_close_matches(topology, TOPOLOGIES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"topology {topology!r}: compiled for are {', '.join(TOPOLOGIES)}; nearest: {nearest}"
        )
    return math.prod(int(size) for size in topology.split(":")[1].split("x"))
