"""The TPU v5e host that the TPU compiler compiles for without a TPU."""

from __future__ import annotations

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

GIB = 2**30
HBM_GIB = 15.75
"""Memory of a v5e chip that a program may use, as the compiler reports it."""
