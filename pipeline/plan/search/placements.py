"""Placements and meshes that the planner compares: those that processes can lease and open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from configs.plan import TPU_LEASES
from configs.schema import Config
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.cost_model.hardware import Topology, device_count
from pipeline.plan.sizes import with_plan

PLACEMENT_KEYS = (
    "placement",
    "learner_devices",
    "samplers",
    "sampler_devices",
    "fsdp",
    "tp",
    "sampler_tp",
)
"""Settings of [plan] that define a placement."""
_SAMPLER_CHIPS = 4
"""Chips of each sampler on hosts beside that of the learner."""


def placements(config: Config, shape: ModelShape, topology: Topology) -> list[Config]:
    """The configuration in each placement to compare; see `with_placement` for its sizes.

    Its own is the first, if it has one and the topology has the devices. With `rollout.ahead` all
    others are split.
    """
    others = [with_placement(config, placement) for placement in _placements(shape, topology)]
    if config.rollout.ahead != "off":
        others = [one for one in others if one.plan.placement == "split"]
    if config.plan.searches_placement or not _holds(topology, config):
        return others
    return [config, *(one for one in others if _identity(one) != _identity(config))]


def with_placement(config: Config, placement: Mapping[str, Any]) -> Config:
    """The configuration in another placement, with settings of `PLACEMENT_KEYS`; not validated.

    Given sizes stay the same on each device, rounded down to whole shards, with at least one slot
    and one row on each.
    """
    own = config.plan
    settings = dict.fromkeys(("samplers", "sampler_devices", "sampler_tp")) | dict(placement)
    placed = with_plan(config, settings)
    plan = placed.plan
    samplers, learners = own.devices_per_sampler, own.learner_devices
    slots, tokens = own.slots, own.micro_batch_tokens
    if slots is not None:
        slots = slots * plan.devices_per_sampler // samplers
        slots = _multiple(slots, plan.sampler_shards)
    if tokens is not None:
        tokens = tokens * plan.learner_devices // learners
        tokens = _multiple(tokens, config.row_tokens * plan.learner_shards)
    return with_plan(placed, {"slots": slots, "micro_batch_tokens": tokens})


def placed_as(config: Config, other: Config) -> Config:
    """The configuration in the placement of `other`."""
    return with_placement(config, {key: getattr(other.plan, key) for key in PLACEMENT_KEYS})


def settings_to_set(config: Config, placed: Config, names: Iterable[str]) -> dict[str, Any]:
    """Settings by dotted key that turn a configuration into a plan of it.

    Compared are the placement, the given sizes and `names` of [plan].
    """
    own = placed_as(config, placed)
    values = {key: getattr(placed.plan, key) for key in (*PLACEMENT_KEYS, *names)}
    values |= {key: getattr(own.plan, key) for key in ("slots", "micro_batch_tokens")}
    return {
        f"plan.{key}": value for key, value in values.items() if value != getattr(config.plan, key)
    }


def _multiple(size: int, unit: int) -> int:
    """The largest multiple of `unit` up to `size`; at least `unit`."""
    return max(1, size // unit) * unit


def _identity(config: Config) -> tuple[object, ...]:
    """Resolved values that are equal for equal placements."""
    plan = config.plan
    learner = plan.placement == "split", plan.learner_devices, plan.fsdp, plan.tp
    return *learner, plan.num_samplers, plan.devices_per_sampler, plan.tp_of_sampler


def _holds(topology: Topology, config: Config) -> bool:
    """Whether the topology has the devices."""
    return device_count(config) <= topology.chips


def _placements(shape: ModelShape, topology: Topology) -> Iterator[Mapping[str, Any]]:
    chips, host, platform = topology.chips, topology.chips_per_host, topology.chip.platform
    if platform == "cpu":
        return  # virtual devices share the same cores in every placement
    for fsdp, tp in _meshes(shape, topology):
        yield {"placement": "colocated", "learner_devices": host, "fsdp": fsdp, "tp": tp}
    if platform == "tpu" and topology.hosts == 1:
        for learner in TPU_LEASES:
            if chips > learner:
                yield _split(topology, learner=learner, each=1)
    if platform == "tpu" and topology.hosts > 1:
        # One host is the learner's; samplers share the others.
        for fsdp, tp, sampler_tp in product((1, host), (1, 4), (1, _SAMPLER_CHIPS)):
            parts = fsdp * tp
            if host % parts == 0 and shape.vocab % parts == 0 and shape.heads % tp == 0:
                mesh = {"fsdp": fsdp, "tp": tp, "sampler_tp": sampler_tp}
                yield _split(topology, learner=host, each=_SAMPLER_CHIPS) | mesh


def _split(topology: Topology, *, learner: int, each: int) -> dict[str, Any]:
    """A learner, and samplers of `each` chips on all chips that are left."""
    return {
        "placement": "split",
        "learner_devices": learner,
        "samplers": (topology.chips - learner) // each,
        "sampler_devices": each,
        "fsdp": 1,
        "tp": 1,
    }


def _meshes(shape: ModelShape, topology: Topology) -> Iterator[tuple[int, int]]:
    """Values of (fsdp, tp); both axes stay within a host."""
    within = topology.chips_per_host
    found = [(1, 1), (within, 1), (1, 2), (1, 4), (within // 2, 2)]
    for fsdp, tp in dict.fromkeys(found):
        parts = fsdp * tp
        if parts and within % parts == 0 and shape.heads % tp == 0 and shape.vocab % parts == 0:
            yield fsdp, tp


def placement_name(config: Config, topology: Topology) -> str:
    """A configuration's placement in words; names idle devices."""
    plan = config.plan
    mesh = [f"{key} {parts}" for key, parts in (("fsdp", plan.fsdp), ("tp", plan.tp)) if parts > 1]
    if plan.placement != "split":
        devices = plan.learner_devices
        if devices == 1:
            return "colocated, one device"
        some = f" on {devices} of {topology.chips}" if devices < topology.chips else ""
        return f"colocated{some}, {', '.join(mesh) or 'base on every device'}"
    each = plan.devices_per_sampler
    samplers = f"{plan.num_samplers} x {each}" if each > 1 else f"{plan.num_samplers}"
    sampler_mesh = [f"sampler tp {plan.tp_of_sampler}"] if plan.tp_of_sampler > 1 else []
    parts = ", ".join([*mesh, *sampler_mesh])
    return f"split, {samplers} + {plan.learner_devices}" + (f", {parts}" if parts else "")
