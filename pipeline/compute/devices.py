"""Device set-up of a process: environment variables before JAX starts, and the mesh.

Meshes are opened inside actors only. Another kind or number of devices than planned is an error.
JAX is imported inside functions: the driver computes the environment of its actors here.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from pipeline.compute.program_cache import use_program_cache
from pipeline.run.cache_folder import CACHE_VARIABLE

if TYPE_CHECKING:
    from jax.sharding import Mesh

JAX_PLATFORM = {"cpu": "cpu", "tpu": "tpu", "gpu": "cuda"}
_HOST_CHIPS = 8
"""Chips of a v5e host; a process with fewer shares the host with others."""
_HALF_HOST_CHIPS = 4
_TUNABLES = "GLIBC_TUNABLES"
_HOST_VARIABLES = (
    # The processes of a slice, to which this process does not belong: "local" where a host has one.
    "TPU_PROCESS_ADDRESSES",
    # Second names of the bounds that Ray and this module set.
    *("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS"),
    # A port for each chip of the host: each process would listen on all of them.
    "TPU_RUNTIME_METRICS_PORTS",
)
"""Variables for a process with all chips of the host."""
_MALLOC = {
    "glibc.malloc.hugetlb": 1,  # pages of 2 MiB
    # One heap that reuses freed memory and returns none to the system. Each setting alone has
    # little effect.
    "glibc.malloc.arena_max": 1,
    "glibc.malloc.mmap_max": 0,
    "glibc.malloc.trim_threshold": 1 << 40,
}
_V5E = ("TPU v5 lite", "TPU v5e")
"""JAX's names of the chips that runs are planned for."""


def open_mesh(*, platform: str, count: int, fsdp: int = 1, tp: int = 1) -> Mesh:
    """Starts JAX and makes a mesh of this process's devices; see `sharding.make_mesh`.

    Raises:
        ValueError: if JAX does not find exactly `count` devices of kind `platform`, or finds TPUs
            other than v5e, which plans support but runs do not.
    """
    if platform == "tpu" and count < _HOST_CHIPS:
        _share_host(count)
    import jax

    from pipeline.compute.model.sharding import make_mesh

    use_program_cache()
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise ValueError(
            f"plan.platform = {platform!r} needs {count} {platform} device(s), and JAX finds none: "
            f"{str(error).splitlines()[0]}"
        ) from None
    found = devices[0].platform
    if found != platform or len(devices) != count:
        raise ValueError(
            f"plan.platform = {platform!r} needs {count} {platform} device(s) in this process; "
            f"JAX finds {len(devices)} {found} device(s)"
        )
    kind = devices[0].device_kind
    if platform == "tpu" and kind not in _V5E:
        raise ValueError(
            f"these are chips of kind {kind!r}; runs support v5e only, plans (launch.plan) also "
            "others; nearest valid: a TPU v5e host"
        )
    return make_mesh(devices, fsdp=fsdp, tp=tp)


def _share_host(chips: int) -> None:
    """Prepares libtpu for a process that shares a host's chips with other processes.

    Ray sets `TPU_VISIBLE_CHIPS`, and the bounds for one and two chips. Variables of other
    frameworks do not change.
    """
    if chips == _HALF_HOST_CHIPS:
        os.environ["TPU_CHIPS_PER_HOST_BOUNDS"] = "2,2,1"
        os.environ["TPU_HOST_BOUNDS"] = "1,1,1"
        # With these bounds libtpu locks the host exclusively unless this variable is set.
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    for name in _HOST_VARIABLES:
        os.environ.pop(name, None)
    # All processes would use the same default port.
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    os.environ["TPU_MESH_CONTROLLER_ADDRESS"] = f"localhost:{port}"
    os.environ["TPU_MESH_CONTROLLER_PORT"] = str(port)


def malloc_environment() -> dict[str, str]:
    """Variables that make glibc keep freed memory, for a process that computes on a CPU.

    A program allocates its temporaries at each call, and the system clears new pages, which took a
    third of a gradient's time and more. glibc reads the variable when the process starts; other C
    libraries ignore it. Settings that are already in GLIBC_TUNABLES do not change.
    """
    given = os.environ.get(_TUNABLES, "")
    own = [f"{name}={value}" for name, value in _MALLOC.items() if name not in given]
    return {_TUNABLES: ":".join(filter(None, (given, *own)))}


def environment(*, platform: str, count: int) -> dict[str, str]:
    """Environment variables for the process, to be set before it imports JAX; keeps XLA_FLAGS."""
    variables = {"JAX_PLATFORMS": JAX_PLATFORM[platform]}
    if platform == "cpu":
        variables |= malloc_environment()
        # The last of two equal flags takes effect.
        devices = f"--xla_force_host_platform_device_count={count}"
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()
    # Workers of a cluster do not inherit it.
    if (folder := os.environ.get(CACHE_VARIABLE)) is not None:
        variables[CACHE_VARIABLE] = folder
    return variables
