"""Which placements and meshes a plan compares: only those that processes can lease and open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from configs.plan import TPU_LEASES
from configs.schema import Config
from pipeline.contracts.model_shape import ModelShape
from pipeline.plan.cost_model.hardware import Topology, devices_of

PLACE = ("placement", "learner_devices", "samplers", "sampler_devices", "fsdp", "tp", "sampler_tp")
"""The settings of [plan] that are a placement."""

_IMPORTANCE_CAP = 2.0
"""Where the configuration has none and needs one."""


@dataclass(frozen=True)
class Candidate:
    """A placement.

    Attributes:
        name: in words.
        config: with this placement; sizes as `placed` has them.
        configured: whether it is the configuration's own.
        same_run: whether it learns the same; no: it draws a step ahead.
    """

    name: str
    config: Config
    configured: bool = False
    same_run: bool = True


def candidates(config: Config, shape: ModelShape, topology: Topology) -> list[Candidate]:
    """The configuration's own placement first, if the topology holds it, then all others.

    With `rollout.ahead` there are only splits; without, each split is also there with it.
    """
    ahead = config.rollout.ahead != "off"
    found = [placed(config, place) for place in _places(shape, topology)]
    found = [one for one in found if one.plan.placement == "split" or not ahead]
    first, others = [], found
    if _holds(topology, config):
        first = [Candidate(_name(config, topology), config, configured=True)]
        others = [one for one in found if _place(one) != _place(config)]
    rest = [Candidate(_name(one, topology), one) for one in others]
    if not ahead and config.rollout.dynamic_sampling != "adaptive":
        splits = [one for one in found if one.plan.placement == "split"]
        drawn = [_ahead(one) for one in splits]
        rest += [Candidate(_name(one, topology), one, same_run=False) for one in drawn]
    return [*first, *rest]


def placed(config: Config, place: Mapping[str, Any]) -> Config:
    """The configuration in another placement; unchecked.

    Sizes that it gives stay what they are for each device, and are at least one slot and one row on
    each shard: there are none without.

    Args:
        config: as it was given.
        place: settings of `PLACE`; those that are left out have no value.
    """
    own = config.plan
    places = dict.fromkeys(("samplers", "sampler_devices", "sampler_tp")) | dict(place)
    plan = own.model_copy(update={**places, "slot_buckets": None})
    samplers, learners = own.devices_per_sampler, own.learner_devices
    slots, tokens = own.slots, own.micro_batch_tokens
    if slots is not None:
        slots = slots * plan.devices_per_sampler // samplers
        slots = _multiple(slots, plan.sampler_shards)
    if tokens is not None:
        tokens = tokens * plan.learner_devices // learners
        tokens = _multiple(tokens, config.row_tokens * plan.learner_shards)
    sizes = {"slots": slots, "micro_batch_tokens": tokens}
    return config.model_copy(update={"plan": plan.model_copy(update=sizes)})


def _multiple(size: int, unit: int) -> int:
    """The multiple of `unit` that is not above `size`; at least one."""
    return max(1, size // unit) * unit


def _place(config: Config) -> tuple[object, ...]:
    """What makes two placements the same."""
    plan = config.plan
    of_learner = plan.placement, plan.learner_devices, plan.fsdp, plan.tp
    return *of_learner, plan.num_samplers, plan.devices_per_sampler, plan.tp_of_sampler


def _ahead(config: Config) -> Config:
    """The same, drawn a step ahead, with the importance weights that this needs."""
    cap = config.learner.importance_cap or _IMPORTANCE_CAP
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"ahead": "one"}),
            "learner": config.learner.model_copy(update={"importance_cap": cap}),
        }
    )


def _holds(topology: Topology, config: Config) -> bool:
    """Whether a run as configured would be one on this topology."""
    if topology.hosts > 1:
        return devices_of(config) == topology.chips
    return devices_of(config) <= topology.chips


def _places(shape: ModelShape, topology: Topology) -> Iterator[Mapping[str, Any]]:
    chips, platform = topology.chips, topology.chip.platform
    if platform == "cpu":
        return  # its devices are virtual: however they are placed, the cores are the same
    for fsdp, tp in _meshes(shape, topology):
        yield {"placement": "colocated", "learner_devices": chips, "fsdp": fsdp, "tp": tp}
    if platform == "tpu" and topology.hosts == 1:
        for learner in TPU_LEASES:
            samplers = chips - learner
            if samplers > 0:
                yield {
                    "placement": "split",
                    "learner_devices": learner,
                    "samplers": samplers,
                    "sampler_devices": 1,
                    "fsdp": 1,
                    "tp": 1,
                }


def _meshes(shape: ModelShape, topology: Topology) -> Iterator[tuple[int, int]]:
    """Parts of weights and of widths; over several hosts both stay within one."""
    within = topology.chips // topology.hosts
    found = [(1, 1), (within, 1), (1, 2), (1, 4), (within // 2, 2)]
    for fsdp, tp in dict.fromkeys(found):
        parts = fsdp * tp
        if parts and within % parts == 0 and shape.heads % tp == 0 and shape.vocab % parts == 0:
            yield fsdp, tp


def _name(config: Config, topology: Topology) -> str:
    """In words; how many devices, where colocated leaves some idle."""
    plan = config.plan
    mesh = [f"{key} {parts}" for key, parts in (("fsdp", plan.fsdp), ("tp", plan.tp)) if parts > 1]
    if plan.placement == "colocated":
        devices = plan.learner_devices
        if devices == 1:
            return "colocated, one device"
        some = f" on {devices} of {topology.chips}" if devices < topology.chips else ""
        return f"colocated{some}, {', '.join(mesh) or 'base on every device'}"
    each = plan.devices_per_sampler
    samplers = f"{plan.num_samplers} x {each}" if each > 1 else f"{plan.num_samplers}"
    of_sampler = [f"sampler tp {plan.tp_of_sampler}"] if plan.tp_of_sampler > 1 else []
    parts = ", ".join([*mesh, *of_sampler])
    parts = ", ".join([parts] * bool(parts) + ["a step ahead"] * (config.rollout.ahead != "off"))
    return f"split, {samplers} + {plan.learner_devices}" + (f", {parts}" if parts else "")
