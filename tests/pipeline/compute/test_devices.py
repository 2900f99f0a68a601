"""Each process gets its own devices, and only actors start JAX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from pipeline.compute.devices import environment, open_mesh
from pipeline.run.cache_folder import CACHE_VARIABLE

ROOT = Path(__file__).parents[3]
COMPUTE = [ROOT / "pipeline" / "compute" / name for name in ("model", "decode", "learner", "aot")]
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "qwix", "tunix", "torch")


def heavy_after(*modules: str) -> list[str]:
    """The heavy packages that a new process has imported after importing the modules."""
    code = (
        f"import sys, json; import {', '.join(modules)}; "
        f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: list[str] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_the_driver_and_the_control_plane_never_import_jax():
    modules = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for pattern in ("actors/*.py", "launch/*.py", "pipeline/**/*.py", "rewards/*.py")
        for path in ROOT.glob(pattern)
        if path.name != "__init__.py" and path.parent not in COMPUTE
    )
    driver = {"actors.handles", "launch.train", "launch.session", "pipeline.coordinator"}
    assert driver <= set(modules)
    assert heavy_after(*modules) == []


def test_other_devices_than_planned_are_an_error(monkeypatch: pytest.MonkeyPatch):
    # This process has 8 virtual CPU devices.
    assert open_mesh(platform="cpu", count=8).devices.size == 8
    with pytest.raises(ValueError, match=r"'cpu' needs 3 cpu device\(s\) in .*; JAX finds 8 cpu"):
        open_mesh(platform="cpu", count=3)
    found: list[Any] = [SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")]
    monkeypatch.setattr(jax, "devices", lambda: found)
    with pytest.raises(ValueError, match=r"^these are chips of kind 'TPU v6 lite'; runs support"):
        open_mesh(platform="tpu", count=1)


HOST = {
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_PROCESS_ADDRESSES": "local",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_RUNTIME_METRICS_PORTS": "8431,8432,8433,8434,8435,8436,8437,8438",
    # Of other images; libtpu prefers these names of the bounds.
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,4,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_MESH_CONTROLLER_ADDRESS": "localhost:8476",
    "TPU_MESH_CONTROLLER_PORT": "8476",
    "TPU_VISIBLE_CHIPS": "0,1,2,3",
}
"""Variables of Kaggle's TPU image of August 2026, and others that may be set before."""


def tpu_environment(monkeypatch: pytest.MonkeyPatch, *, count: int) -> dict[str, str]:
    """Variables of libtpu after a process with `count` chips has opened its mesh."""
    kept = {name: value for name, value in os.environ.items() if "TPU" not in name}
    monkeypatch.setattr(os, "environ", kept | HOST)
    with pytest.raises(ValueError, match="needs"):
        open_mesh(platform="tpu", count=count)
    return {name: value for name, value in os.environ.items() if "TPU" in name}


def test_a_process_with_a_whole_host_keeps_its_environment(monkeypatch: pytest.MonkeyPatch):
    assert tpu_environment(monkeypatch, count=8) == HOST


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_process_with_some_chips_shares_the_host(monkeypatch: pytest.MonkeyPatch, count: int):
    found = [tpu_environment(monkeypatch, count=count) for _ in range(2)]
    ports = [int(one.pop("TPU_MESH_CONTROLLER_PORT")) for one in found]
    assert len({8476, *ports}) == 3
    addresses = [one.pop("TPU_MESH_CONTROLLER_ADDRESS") for one in found]
    assert addresses == [f"localhost:{port}" for port in ports]
    kept = ("TPU_HOST_BOUNDS", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_VISIBLE_CHIPS")
    shared = {name: HOST[name] for name in kept}
    if count == 4:
        shared |= {"TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    else:
        shared |= {"TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1"}  # set by Ray before
    assert found == [shared, shared]


def test_the_environment_sets_platform_and_number_of_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --other=1")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    assert environment(platform="tpu", count=4) == {"JAX_PLATFORMS": "tpu"}
    assert environment(platform="gpu", count=1) == {"JAX_PLATFORMS": "cuda"}
    found = environment(platform="cpu", count=2)
    assert found.pop("GLIBC_TUNABLES").startswith("glibc.malloc.check=0:glibc.malloc.hugetlb=1:")
    given = os.environ["XLA_FLAGS"]
    assert found == {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{given} --xla_force_host_platform_device_count=2",
    }
