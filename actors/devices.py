"""What a process does before and right after JAX starts: see exactly the devices it was given.

Meshes are opened inside actors only. Nothing is substituted: another kind or number of devices is
an error.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from actors.program_cache import use_program_cache
from pipeline.contracts.cache_folder import CACHE_VARIABLE

if TYPE_CHECKING:
    from jax.sharding import Mesh

JAX_PLATFORM = {"cpu": "cpu", "tpu": "tpu", "gpu": "cuda"}
_HOST_CHIPS = 8
"""Chips of a v5e host; a process with fewer shares the host with others."""
_HALF_HOST_CHIPS = 4
_TUNABLES = "GLIBC_TUNABLES"
_MALLOC = {
    "glibc.malloc.hugetlb": 1,  # pages of 2 MiB
    # What was freed is found again by whoever asks next: one heap, none beside it, and none of it
    # goes back. Any one of these alone changes little.
    "glibc.malloc.arena_max": 1,
    "glibc.malloc.mmap_max": 0,
    "glibc.malloc.trim_threshold": 1 << 40,
}
_V5E = ("TPU v5 lite", "TPU v5e")
"""What JAX calls the chips that sizes and programs are planned for."""


def open_mesh(*, platform: str, count: int, fsdp: int = 1, tp: int = 1) -> Mesh:
    """Starts JAX and makes a mesh of this process's devices; see `sharding.make_mesh`.

    Raises:
        ValueError: if JAX finds other devices than `count` of kind `platform`, or TPUs other than
            v5e, which can be planned for only.
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
            f"these are chips of kind {kind!r}; runs are for v5e only, others can be planned for "
            "(launch.plan); nearest valid: a TPU v5e host"
        )
    return make_mesh(devices, fsdp=fsdp, tp=tp)


def _share_host(chips: int) -> None:
    """Prepares libtpu for a process that has some of a host's chips; other processes have the rest.

    Ray has set `TPU_VISIBLE_CHIPS`, and the bounds for one and two chips. Variables that other
    frameworks read stay as they are.
    """
    if chips == _HALF_HOST_CHIPS:
        os.environ["TPU_CHIPS_PER_HOST_BOUNDS"] = "2,2,1"
        os.environ["TPU_HOST_BOUNDS"] = "1,1,1"
        # For these bounds libtpu locks the host exclusively, unless told that it is shared.
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    # The host's own lists the processes of a slice, to which this process does not belong.
    os.environ.pop("TPU_PROCESS_ADDRESSES", None)
    # All processes would use the same default port.
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    os.environ["TPU_MESH_CONTROLLER_ADDRESS"] = f"localhost:{port}"
    os.environ["TPU_MESH_CONTROLLER_PORT"] = str(port)


def kept_memory() -> dict[str, str]:
    """Variables for a process that computes on a CPU: memory that it has had once it keeps.

    A program's temporaries are new memory at each call, and what is new the system clears first;
    that took a third of a gradient's time and more. Read by glibc when the process starts; others
    ignore it. What GLIBC_TUNABLES says already stays so.
    """
    given = os.environ.get(_TUNABLES, "")
    own = [f"{name}={value}" for name, value in _MALLOC.items() if name not in given]
    return {_TUNABLES: ":".join(filter(None, (given, *own)))}


def environment(*, platform: str, count: int) -> dict[str, str]:
    """Environment variables for the process, to be set before it imports JAX; keeps XLA_FLAGS."""
    variables = {"JAX_PLATFORMS": JAX_PLATFORM[platform]}
    if platform == "cpu":
        variables |= kept_memory()
        # The last of two equal flags counts.
        devices = f"--xla_force_host_platform_device_count={count}"
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()
    if CACHE_VARIABLE in os.environ:
        variables[CACHE_VARIABLE] = os.environ[
            CACHE_VARIABLE
        ]  # a cluster's workers do not inherit it
    return variables
