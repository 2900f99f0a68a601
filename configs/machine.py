"""The accelerators of this machine, for `plan.platform = "auto"`: found without JAX."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

GpuName = Literal["l4", "rtx-4090", "a100-40", "a100-80", "h100", "h200"]
"""NVIDIA cards with known limits: values of `plan.gpu`, and names of topologies."""
GPU_NAMES: tuple[GpuName, ...] = get_args(GpuName)

_TPU_HOST = 8
"""Chips of a v5e host; a process can have 1, 4 or 8 of them."""
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_JAX_SHARE = 0.75
_CARDS: dict[str, GpuName] = {
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}
"""The driver's names of these cards. Variants with other speeds (H100 PCIe, RTX 4090 D) are not
among them."""
_NOTHING = "neither a TPU nor an NVIDIA GPU"


@dataclass(frozen=True)
class Machine:
    """What a run without `plan.platform` gets.

    Attributes:
        platform: a `plan.platform`.
        devices: number of devices of the run.
        why: what was found, in words.
        gpu: the kind of its NVIDIA cards; None: not known, several kinds, or another platform.
        hbm_gib: memory that JAX takes of the smallest card; None: unknown, or another platform.
    """

    platform: Literal["cpu", "tpu", "gpu"]
    devices: int
    why: str
    gpu: GpuName | None = None
    hbm_gib: float | None = None


def this_machine(root: Path = Path("/")) -> Machine:
    """A TPU before an NVIDIA GPU that JAX can use, else the CPU.

    Args:
        root: of the device files, which tests imitate.
    """
    chips = len(tpu_chips(root))
    if chips:
        devices = max(size for size in (1, 4, _TPU_HOST) if size <= chips)
        return Machine("tpu", devices, f"{chips} TPU chip{'s' if chips > 1 else ''}")
    found = nvidia_gpus()
    if found.platform == "gpu" and not any(map(importlib.util.find_spec, _CUDA_PLUGINS)):
        return Machine("cpu", 1, f"{found.why} without JAX for CUDA (make install-cuda13)")
    return found


def tpu_chips(root: Path = Path("/")) -> list[str]:
    """Device files of the TPU chips, in their order: /dev/accelN, or else /dev/vfio/N."""
    found = [path for path in root.glob("dev/accel*") if not path.is_dir()]
    found = found or [path for path in root.glob("dev/vfio/*") if path.name.isdecimal()]
    paths = sorted(found, key=lambda path: (len(path.name), path.name))
    return [f"/{path.relative_to(root)}" for path in paths]


def nvidia_gpus() -> Machine:
    """The NVIDIA cards that programs may use, by their driver's tool; a run takes one of them."""
    query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return Machine("cpu", 1, _NOTHING)
    except subprocess.TimeoutExpired:
        return Machine("cpu", 1, "an NVIDIA driver that does not answer (nvidia-smi)")
    if done.returncode != 0:
        said = (done.stdout or done.stderr).strip().partition("\n")[0]
        return Machine("cpu", 1, f"no NVIDIA GPU that can be used (nvidia-smi: {said})")
    cards = [tuple(line.split(", ")) for line in done.stdout.splitlines()]
    return _of_cards(_visible(cards))


def jax_gib(memory_mib: float) -> float:
    """The memory that JAX takes of a card with `memory_mib` MiB, in whole hundredths of a GiB."""
    try:
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _JAX_SHARE))
    except ValueError:  # JAX refuses it
        share = _JAX_SHARE
    return math.floor(100 * share * memory_mib / 1024) / 100


def _visible(cards: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The cards that CUDA_VISIBLE_DEVICES names by number or beginning of a UUID; unset: all."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return list(cards)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    return [
        card
        for number, card in enumerate(cards)
        if any(
            name == str(number) or (name.startswith("GPU-") and card[0].startswith(name))
            for name in wanted
        )
    ]


def _of_cards(cards: Sequence[tuple[str, ...]]) -> Machine:
    if not cards:
        return Machine("cpu", 1, f"{_NOTHING} that CUDA_VISIBLE_DEVICES allows")
    name = cards[0][1]
    kind = _CARDS.get(name) if all(card[1] == name for card in cards) else None
    try:
        least = min(float(card[2]) for card in cards)
    except ValueError:  # "[N/A]" where a card has no memory of its own
        return Machine("gpu", 1, f"{len(cards)} x {name}")
    why = f"{len(cards)} x {name} with {least / 1024:.1f} GiB"
    return Machine("gpu", 1, why, kind, jax_gib(least))
