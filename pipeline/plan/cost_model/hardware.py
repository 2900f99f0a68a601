"""Hardware that the planner knows: memory, speed and price of chips, and topologies.

These are published limits. Accelerators of this machine are not inspected (`configs.machine` does
that); memory and cores of the topology `cpu` are those of this machine.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace

from configs.machine import GpuName, jax_gib
from configs.schema import Config, Plan
from pipeline.plan.topology import GIB, HBM_GIB


@dataclass(frozen=True)
class Chip:
    """A kind of device.

    Attributes:
        name: common name.
        platform: a `plan.platform`.
        hbm_gib: memory that programs may use.
        bf16_flops: peak operations per second in bfloat16; on a CPU in float32.
        bytes_per_s: peak memory bandwidth.
        link_bytes_per_s: peak bandwidth of all links to other chips together.
        layer_s: least seconds of a layer in a decode step.
        chip_hour_usd: list price, if known.
    """

    name: str
    platform: str
    hbm_gib: float
    bf16_flops: float
    bytes_per_s: float
    link_bytes_per_s: float
    layer_s: float
    chip_hour_usd: float | None = None


@dataclass(frozen=True)
class Topology:
    """Chips of a run, by the name that `--topology` has; the TPU compiler supports some of them."""

    name: str
    chip: Chip
    chips: int
    hosts: int
    has_compiler: bool = False

    @property
    def chips_per_host(self) -> int:
        """Number of chips of a machine."""
        return self.chips // self.hosts


# HBM: 16 GB less the runtime's share; https://cloud.google.com/tpu/docs/v5e. The price is the
# on-demand list price of us-central1 in 2025.
_V5E = Chip("TPU v5e", "tpu", HBM_GIB, 197e12, 819e9, 200e9, 10e-6, 1.20)
# By memory, and then by speed. https://www.nvidia.com/en-us/data-center/l4, a100, h100 and h200
# (SXM), and "NVIDIA Ada GPU Architecture", appendix A. Of products of sparse matrices, which they
# give, dense ones are half; sums are in float32. A link is one direction of NVLink or PCIe. The
# memory is what JAX takes of what the driver reports, in MiB.
_GPUS: dict[GpuName, Chip] = {
    "l4": Chip("NVIDIA L4", "gpu", jax_gib(23034), 121e12, 300e9, 32e9, 20e-6),
    "rtx-4090": Chip(*("NVIDIA RTX 4090", "gpu", jax_gib(24564)), 165.2e12, 1008e9, 32e9, 20e-6),
    "a100-40": Chip(*("NVIDIA A100 40 GB", "gpu", jax_gib(40960)), 312e12, 1555e9, 300e9, 20e-6),
    "a100-80": Chip(*("NVIDIA A100 80 GB", "gpu", jax_gib(81920)), 312e12, 2039e9, 300e9, 20e-6),
    "h100": Chip("NVIDIA H100", "gpu", jax_gib(81559), 989e12, 3350e9, 450e9, 20e-6),
    "h200": Chip("NVIDIA H200", "gpu", jax_gib(143771), 989e12, 4800e9, 450e9, 20e-6),
}
_SIMILAR = 0.95
"""A GPU is taken for one of another kind with at least this share of its memory."""
_CARDS_OF_HOST = (1, 2, 4, 8)
_CORE_FLOPS, _CORE_BYTES_PER_S = 50e9, 8e9
"""Speed of a CPU core on the matrices of a small model."""


def _topologies() -> dict[str, Topology]:
    found = [Topology(f"v5e-{n}", _V5E, n, 1, has_compiler=True) for n in (1, 4, 8)]
    found += [Topology(f"v5e-{n}", _V5E, n, n // 8) for n in (16, 32, 64, 128, 256)]
    for name, chip in _GPUS.items():
        found += [Topology(name, chip, 1, 1)]
        found += [Topology(f"{name}x{n}", chip, n, 1) for n in _CARDS_OF_HOST[1:]]
    return {topology.name: topology for topology in found}


TOPOLOGIES = _topologies()
"""Topologies by name; `cpu` is not among them."""


def cpu(devices: int, *, at_once: int) -> Topology:
    """This machine's CPU as virtual devices, which share its memory; `at_once` share its cores."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = os.cpu_count() or 1
    flops, speed = cores * _CORE_FLOPS / at_once, cores * _CORE_BYTES_PER_S / at_once
    chip = Chip("CPU", "cpu", memory / devices, flops, speed, speed, 40e-6)
    return Topology("cpu", chip, devices, 1)


def device_count(config: Config) -> int:
    """Number of devices of all processes of the run."""
    plan = config.plan
    if plan.placement != "split":
        return plan.learner_devices
    return plan.learner_devices + plan.num_samplers * plan.devices_per_sampler


def topology_of(config: Config, name: str | None) -> Topology:
    """The topology to plan for: `name`, or else the devices of the configuration.

    `plan.chip_hour_usd` replaces the list price and `plan.hbm_gib` bounds the memory.

    Raises:
        ValueError: if there is no such topology, if its platform differs from the configuration's,
            or if the configuration alone does not determine one.
    """
    plan, count = config.plan, device_count(config)
    nearest = _nearest(plan, count)
    if name is None:
        # Without a name the speeds are those of the smallest known GPU with this memory.
        has_memory = plan.gpu is not None or plan.hbm_gib is not None
        gpu = has_memory and count <= _CARDS_OF_HOST[-1]
        known = {"cpu": True, "tpu": count <= TOPOLOGIES["v5e-256"].chips, "gpu": gpu}
        if not known[plan.platform]:
            raise ValueError(
                f'plan.platform = "{plan.platform}" with {count} device(s) does not determine a '
                f"topology; nearest valid: --topology {nearest}"
            )
        name = nearest
    found = cpu(count, at_once=plan.learner_devices) if name == "cpu" else _named(name)
    chip = found.chip
    if chip.platform != plan.platform:
        raise ValueError(
            f"command line: --topology {name}: plan.platform is {plan.platform!r}, not "
            f"{chip.platform!r}; nearest valid: {nearest}, or --plan.platform {chip.platform}"
        )
    if plan.chip_hour_usd is not None:
        chip = replace(chip, chip_hour_usd=plan.chip_hour_usd)
    if plan.hbm_gib is not None:
        chip = replace(chip, hbm_gib=min(plan.hbm_gib, chip.hbm_gib))
    return replace(found, chip=chip)


def has_own_topology(config: Config, topology: Topology) -> bool:
    """Whether the topology has as many chips as the one that the configuration determines."""
    if config.plan.platform == "cpu":
        return True
    own = TOPOLOGIES[_nearest(config.plan, device_count(config))]
    return own.chips == topology.chips


def _named(name: str) -> Topology:
    if name in TOPOLOGIES:
        return TOPOLOGIES[name]
    (close,) = difflib.get_close_matches(name, TOPOLOGIES, n=1, cutoff=0.0)
    kinds = f"cpu, v5e-1 to v5e-256, {', '.join(_GPUS)} (and h100x8)"
    raise ValueError(
        f"command line: --topology {name}: unknown; known topologies: {kinds}; nearest "
        f"valid: {close}"
    )


def _nearest(plan: Plan, count: int) -> str:
    """The smallest topology of the platform with at least `count` chips, or else the largest."""
    if plan.platform == "cpu":
        return "cpu"
    names = r"v5e-\d+"
    if plan.platform == "gpu":
        names = rf"{plan.gpu or _similar_gpu(plan.hbm_gib)}(x\d)?"
    found = [topology for name, topology in TOPOLOGIES.items() if re.fullmatch(names, name)]
    large_enough = [topology for topology in found if topology.chips >= count]
    return (large_enough or found[-1:])[0].name


def _similar_gpu(hbm_gib: float | None) -> GpuName:
    """The first known GPU with about this memory; None: an H100."""
    if hbm_gib is None:
        return "h100"
    least = _SIMILAR * hbm_gib
    return next((name for name, chip in _GPUS.items() if chip.hbm_gib >= least), "h200")
