"""The accelerators of this machine, for `plan.platform = "auto"`: found by files, without JAX."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_TPU_HOST = 8
"""Chips of a v5e host; a process can have 1, 4 or 8 of them."""
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_JAX_SHARE = 0.75
_NO_DEVICE = {"", "-1", "NoDevFiles"}


@dataclass(frozen=True)
class Machine:
    """What a run without `plan.platform` gets.

    Attributes:
        platform: a `plan.platform`.
        devices: number of devices of the run.
        hbm_gib: memory of a GPU; None: unknown, or another platform.
        why: what was found, in words.
    """

    platform: Literal["cpu", "tpu", "gpu"]
    devices: int
    hbm_gib: float | None
    why: str


def this_machine(root: Path = Path("/")) -> Machine:
    """A TPU before an NVIDIA GPU that JAX can use, else the CPU.

    Args:
        root: of the device files, which tests imitate.
    """
    chips = len(tpu_chips(root))
    if chips:
        devices = max(size for size in (1, 4, _TPU_HOST) if size <= chips)
        return Machine("tpu", devices, None, f"{chips} TPU chip{'s' if chips > 1 else ''}")
    gpus = len(list(root.glob("proc/driver/nvidia/gpus/*")))
    if not gpus or os.environ.get("CUDA_VISIBLE_DEVICES", "all") in _NO_DEVICE:
        return Machine("cpu", 1, None, "neither a TPU nor an NVIDIA GPU")
    if not any(map(importlib.util.find_spec, _CUDA_PLUGINS)):
        return Machine("cpu", 1, None, "an NVIDIA GPU without JAX for CUDA (make install-cuda13)")
    return Machine("gpu", 1, _gpu_gib(), f"{gpus} NVIDIA GPU{'s' if gpus > 1 else ''}")


def tpu_chips(root: Path = Path("/")) -> list[str]:
    """Device files of the TPU chips, in their order: /dev/accelN, or else /dev/vfio/N."""
    found = [path for path in root.glob("dev/accel*") if not path.is_dir()]
    found = found or [path for path in root.glob("dev/vfio/*") if path.name.isdecimal()]
    paths = sorted(found, key=lambda path: (len(path.name), path.name))
    return [f"/{path.relative_to(root)}" for path in paths]


def _gpu_gib() -> float | None:
    """The part of the smallest GPU's memory that JAX takes, by its driver's tool."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _JAX_SHARE))
        return share * min(float(line) for line in shown.split()) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
