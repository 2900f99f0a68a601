"""Names of a run's compiled programs, and the devices that execute each. No JAX.

A name is a kind and, except for `empty` and `apply`, a size over all devices: positions of a
prompt (prefill, fill), slots (segment), or packed rows (score, reference_top_k, gradient,
sft_gradient).
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import Config

SAMPLER = ("empty", "prefill", "fill", "segment")
"""Kinds of a sampler's programs, except those that compact slots, which are small."""

LEARNER = ("score", "reference_top_k", "gradient", "sft_gradient", "apply")
"""Kinds of a learner's programs."""


@dataclass(frozen=True)
class Devices:
    """Devices that run a program.

    Attributes:
        count: number of devices.
        fsdp: shards of the weights, which are gathered layer by layer.
        tp: shards of heads and feed-forward width.
    """

    count: int
    fsdp: int
    tp: int

    @property
    def shards(self) -> int:
        """Number of shards of the rows."""
        return self.count // self.tp


def split_name(program: str) -> tuple[str, int]:
    """Kind and size of a program; size 0 for `empty` and `apply`."""
    kind, _, size = program.partition(" ")
    assert kind in SAMPLER + LEARNER, program
    return kind, int(size or 0)


def devices_of(config: Config, program: str) -> Devices:
    """The devices of the process that runs the program."""
    kind, _ = split_name(program)
    plan = config.plan
    if kind in SAMPLER:
        return Devices(plan.devices_per_sampler, plan.fsdp_of_sampler, plan.tp_of_sampler)
    return Devices(plan.learner_devices, plan.fsdp, plan.tp)
