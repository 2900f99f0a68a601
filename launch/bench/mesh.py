"""`python -m launch.bench mesh`: a model on 1 to 8 devices by data, tensor and layer parallelism.

All layouts have the same batch on the same devices. It grows with the devices, as in a run. Rows
are no longer than the sliding window.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from configs.machine import this_machine
from configs.plan import HEAD_TOKENS, HEAD_VOCAB, TPU_LEASES
from configs.schema import Config
from launch.bench.costs import chosen_models, fits_host, study_row, traced_figures
from launch.bench.harness import Figures, Found, Row, Section, lines
from launch.bench.layer_split import LayerSplit
from launch.bench.shapes import COMPILER, SHAPES, VOCABULARY, config_of, policy_of
from pipeline.compute.aot.compile import v5e_devices
from pipeline.compute.decode.cache import ring_slots
from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.device_memory import program_bytes
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.learner.timing import fastest_s
from pipeline.compute.model.attention import Layout, PackedAttention
from pipeline.compute.model.head import Head
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import in_host, lowered, replicated
from pipeline.data.models.find_shape import PUBLISHED
from pipeline.data.models.hf_config import read_model_shape, text_config
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.cost_model.roofline import HOST_BYTES_PER_S
from pipeline.plan.topology import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECODE, GRADIENT = "decode", "gradient"
REPLICATED, FSDP, TENSOR = "replicated", "fsdp", "tensor parallel"
SPLIT, GPIPE, STREAMED = "layer split", "GPipe", "streamed"
LAYOUTS = (REPLICATED, FSDP, TENSOR, SPLIT, GPIPE, STREAMED)
COUNTS, LARGEST = (1, 2, 4, 8), 8
SIZES = {"prompt": 256, "new": 256, "slots": 32, "rows": 4}
QUICK = {"prompt": 32, "new": 32, "slots": 8, "rows": 2}
"""Tokens of a prompt and of a completion; slots and rows of a device."""
DETAILED = "gemma3-1b"
"""The model that is compiled for 4 devices, and whose bubble is: others are compiled for 8."""
TIERS_GIB = (16, 24, 80)
ROOM = 0.9
"""Share of a device for base and caches; the rest is for adapter, optimizer and temporaries."""


class Streamed(Policy):
    """A policy whose layers are in host memory; each step copies their matrices to every device.

    ZeRO-Inference (arXiv:2207.00032).
    """

    def abstract_params(self) -> tuple[Params, Params]:
        """See `Policy.abstract_params`."""
        base, adapter = super().abstract_params()
        place = in_host(self.mesh)
        return base | {
            name: x.update(sharding=place) for name, x in matrices(base).items()
        }, adapter

    def bind(self, base: Params, *args: Any, **settings: Any) -> Any:
        """See `Policy.bind`."""
        here = jax.device_put(matrices(base), jax.memory.Space.Device)
        return super().bind(base | here, *args, **settings)


def matrices(base: Params) -> Params:
    """The matrices of the layers."""
    return {name: x for name, x in base.items() if name.startswith("layers.") and x.ndim > 1}


def layout(
    *, model: str, device: str, name: str, devices: int, sizes: Mapping[str, int]
) -> Figures:
    """Decoded tokens a second, positions of the gradient a second, and GiB of a device."""
    chips = _chips(device, devices)
    if len(chips) < devices:
        return {"how": f"there are {len(chips)} devices"}
    config = _config(model, device, name, devices, sizes)
    rows, found = sizes["rows"] * devices, dict[str, Any]()
    policy = _policy(model, config, chips, name, micro_batches=devices)
    if isinstance(policy, LayerSplit):
        traced = _trace_decode(policy, config)
    else:
        traced = DecodePrograms(policy, config, VOCABULARY).trace_segment(config.slots)
    if one := cost(traced, policy.mesh):
        seconds, gib = one
        if name == STREAMED and device == COMPILER:
            base, _ = policy.abstract_params()
            copied = sum(x.size * x.dtype.itemsize for x in matrices(base).values())
            seconds = max(seconds, config.segment_steps * copied / HOST_BYTES_PER_S)
        found |= {DECODE: config.slots * config.segment_steps / seconds, f"{DECODE} GiB": gib}
    if name == STREAMED:
        return found
    policy = _policy(model, config, chips, name, micro_batches=rows)
    learner = LearnerPrograms(policy, config, VOCABULARY)
    trips = learner.expected_blocks(GRADIENT, rows)
    if one := cost(learner.trace_gradient(rows), policy.mesh, trips=trips):
        found |= {GRADIENT: rows * config.row_tokens / one[0], f"{GRADIENT} GiB": one[1]}
    return found


def bubble(
    *, model: str, device: str, stages: int, micro_batches: Sequence[int], sizes: Mapping[str, int]
) -> Figures:
    """The share of time that a pipeline of one row a micro-batch computes nothing of use.

    `slot_ms` is what a further micro-batch takes, the slope of the time by micro-batches: of m of
    them all but m slots are bubble. Only the layers are timed, in a forward pass. Devices compute
    in the bubble, too, so that it takes its time also on virtual devices that share cores.
    """
    chips = _chips(device, stages)
    if len(chips) < stages:
        return {"how": f"there are {len(chips)} devices"}
    config, seconds = _config(model, device, GPIPE, stages, sizes), dict[int, float]()

    def forward(policy: Policy, base: Params, adapter: Params, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        attend = PackedAttention(Layout(positions, jnp.ones_like(positions)))
        return policy.bind(base, adapter)(tokens, positions, attend=attend)[0]

    for count in micro_batches:
        policy = _policy(model, config, chips, GPIPE, micro_batches=count)
        tokens = jax.ShapeDtypeStruct(
            (count, config.row_tokens), jnp.int32, sharding=replicated(policy.mesh)
        )
        program = policy.jit(partial(forward, policy))
        one = cost(program.trace(*policy.abstract_params(), tokens), policy.mesh)
        assert one is not None, count
        seconds[count] = one[0]
    slot_s = float(np.polyfit(list(seconds), list(seconds.values()), 1)[0])
    found = {f"{m}": 1 - m * slot_s / seconds[m] for m in micro_batches}
    expected = {f"(p - 1) / ({m} + p - 1)": (stages - 1) / (m + stages - 1) for m in micro_batches}
    return {"slot_ms": 1e3 * slot_s, **found, **expected}


def _chips(device: str, count: int) -> Sequence[jax.Device]:
    return v5e_devices(count) if device == COMPILER else jax.devices()[:count]


def _config(model: str, device: str, name: str, count: int, sizes: Mapping[str, int]) -> Config:
    ways = {REPLICATED: {}, STREAMED: {}, FSDP: {"plan__fsdp": count}}
    return config_of(
        model,
        device=device,
        slots=sizes["slots"] * count,
        prompt=sizes["prompt"],
        new=sizes["new"],
        plan__learner_devices=count,
        plan__micro_batch_tokens=sizes["rows"] * count * (sizes["prompt"] + sizes["new"]),
        plan__attention="blocked",
        **ways.get(name, {"plan__tp": count}),
    )


def _policy(
    model: str, config: Config, chips: Sequence[jax.Device], name: str, *, micro_batches: int
) -> Policy:
    """The model in a layout; the number of micro-batches is that of GPipe."""
    split = partial(LayerSplit, micro_batches=micro_batches if name == GPIPE else 1)
    kinds: Mapping[str, Callable[..., Policy]] = {SPLIT: split, GPIPE: split, STREAMED: Streamed}
    return policy_of(SHAPES[model], config, chips, kinds.get(name, Policy))


def _trace_decode(policy: LayerSplit, config: Config) -> jax.stages.Traced:
    """`LayerSplit.decode` of a segment."""
    shape, mesh = policy.architecture.shape, policy.mesh
    numbers = jax.ShapeDtypeStruct((config.slots,), jnp.int32, sharding=replicated(mesh))
    (length,) = set(ring_slots(policy.architecture, max_tokens=config.rollout.max_tokens))
    ring = jax.ShapeDtypeStruct(
        (policy.stages, config.slots, shape.kv_heads, length, shape.head_dim),
        policy.architecture.config.param_dtype,
        sharding=policy.by_stage,
    )
    head = Head(shape.final_softcap, 1.0, HEAD_TOKENS, HEAD_VOCAB, mesh)
    rings = policy.depth * [(ring, ring)]
    decode = partial(policy.decode, head=head, steps=config.segment_steps)
    return policy.jit(decode).trace(*policy.abstract_params(), numbers, numbers, rings)


def cost(
    traced: jax.stages.Traced, mesh: Mesh, *, trips: float | None = None
) -> tuple[float, float] | None:
    """Seconds of a program and GiB of a device; None: it does not fit.

    The program may overwrite its third argument only. Of TPUs without one the compiler answers.
    """
    if mesh.devices.flat[0].platform == "tpu" and jax.default_backend() != "tpu":
        found = traced_figures(traced, trips=trips)
        return (found["ms"] / 1e3, found["gib"]) if found["fits"] else None
    program = lowered(traced, mesh).compile()
    needed = program_bytes(program)
    if not fits_host(needed * mesh.size):
        return None
    shapes, places = program.args_info[0], program.input_shardings[0]
    arguments = list(jax.tree.map(_constant, shapes, places))

    def again() -> None:
        arguments[2] = jax.tree.map(_constant, shapes[2], places[2])

    return fastest_s(lambda: jax.block_until_ready(program(*arguments)), before=again), needed / GIB


def _constant(shape: Any, place: jax.sharding.Sharding) -> jax.Array:
    """An array of one value, on which no time depends."""
    value = 0.01 if jnp.issubdtype(shape.dtype, jnp.floating) else 1
    return jax.device_put(np.full(shape.shape, value, shape.dtype), place)


def largest(*, tier_gib: float) -> Figures:
    """Billions of parameters whose base and caches fit, by layout and devices, in bfloat16.

    Of a Gemma 3 27b with as many layers as fit.
    """
    shape = read_model_shape(text_config(PUBLISHED["gemma-3-27b"]))
    layouts = {REPLICATED: 1, STREAMED: 1, FSDP: LARGEST, TENSOR: LARGEST, SPLIT: LARGEST}
    found: dict[str, Any] = {"how": "computed"}
    for name, devices in layouts.items():
        larger = shape = replace(shape, local=(False,))
        while device_bytes(larger, name, devices) <= ROOM * tier_gib * GIB:
            shape, larger = larger, replace(larger, local=(*larger.local, False))
        found[f"{name}, {devices}"] = shape.parameters / 1e9
    return found


def device_bytes(shape: ModelShape, name: str, devices: int) -> float:
    """Bytes of a device's share of the base, of a layer that it copies, and of its caches."""
    kind = "bfloat16"
    whole, layer = shape.base_bytes(kind), shape.layer_bytes(0, kind, tp=1)
    outside = whole - shape.layers * layer
    number = SIZES["slots"] * (SIZES["prompt"] + SIZES["new"]) * 2 * shape.kv_heads * shape.head_dim
    caches = 2 * shape.layers * number
    stage = -(-shape.layers // devices)
    if name == SPLIT:
        return outside / devices + stage * (layer + caches * devices / shape.layers)
    if name == TENSOR:
        shared = 1 if shape.kv_heads % devices == 0 else devices
        return shape.base_bytes(kind, tp=devices) + shared * caches
    base = {REPLICATED: whole, STREAMED: outside + 2 * layer, FSDP: whole / devices + layer}
    return base[name] + caches


def draw(found: Found) -> Figure:
    """Rates against devices; a line is a model, a colour a layout."""

    def point(name: str) -> list[float]:
        rates = [found.get(name, {}).get(work, math.nan) for work in (DECODE, GRADIENT)]
        return [int(name.rpartition(", ")[2]), *rates]

    points: dict[str, list[list[float]]] = {}
    for name in found:
        model, how, _ = name.split(", ")
        # One device is the same for all layouts but the streamed one.
        alone = [] if how in (REPLICATED, STREAMED) else [point(f"{model}, {REPLICATED}, 1")]
        points.setdefault(f"{model}, {how}", alone).append(point(name))
    columns = ("devices", "decoded tokens a second", "positions of the gradient a second")
    return lines(points, columns, [(0, 1), (0, 2)], group=lambda line: line.split(", ")[1])


def draw_largest(found: Found) -> Figure:
    """Bars of the largest models; a colour is a layout."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes, places = figure.subplots(), np.arange(len(found))
    layouts = [key for key in next(iter(found.values()), {}) if key != "how"]
    width = 0.8 / len(layouts)
    for number, name in enumerate(layouts):
        sizes = [row[name] for row in found.values()]
        bars = axes.bar(places + number * width, sizes, width, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize="x-small")
    axes.set(ylabel="billions of parameters", xlabel="memory of a device")
    axes.set_xticks(places + 0.4 - width / 2, list(found))
    axes.legend(title="layout, devices", fontsize="x-small", loc="upper left")
    return figure


def sections(request: argparse.Namespace) -> list[Section]:
    """Rows by model, layout and number of devices; by pipeline; by memory of a device."""
    compiled, models = request.device == COMPILER, chosen_models(request)
    given = {"sizes": QUICK if request.quick else SIZES}
    stages, micro_batches = (8, (1, 8, 32, 64)) if compiled else (4, (1, 4, 16))
    virtual = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={LARGEST}"
    environment = {} if compiled else {"XLA_FLAGS": virtual}
    layouts = [
        study_row(
            request,
            model,
            f", {name}, {devices}",
            layout,
            {**given, "name": name, "devices": devices},
            sizes=1 if name == STREAMED else 2,
        )
        for model in models
        for name in LAYOUTS
        for devices in _counts(model, name, request)
    ]
    pipeline = {**given, "stages": stages, "micro_batches": micro_batches}
    bubbles = [
        study_row(request, model, f", {stages} stages", bubble, pipeline, sizes=len(micro_batches))
        for model in models
        if model == DETAILED or not compiled
    ]
    fits = [Row(f"{tier} GiB", largest, {"tier_gib": tier}, seconds=5) for tier in TIERS_GIB]
    title = (
        "Tokens a second by model, layout and devices; {slots} slots and {rows} rows a device, "
        "{prompt} + {new} tokens; measured gradients learn all positions, compiled ones their share"
    ).format(**given["sizes"])
    share = "Share of a pipeline's time that is bubble, by micro-batches, and expected share"
    fitting = "Billions of parameters that fit, by memory of a device, layout and devices"
    return [
        Section("layouts", title, layouts, environment=environment, draw=draw),
        Section("bubble", share, bubbles, environment=environment),
        Section("largest", fitting, fits, draw=draw_largest),
    ]


def _counts(model: str, name: str, request: argparse.Namespace) -> Sequence[int]:
    """Numbers of devices; a process of a run has 1, 4 or 8 chips of a v5e-8."""
    if name == STREAMED:
        return (1,)
    several: Sequence[int] = (4,) if request.quick else COUNTS[1:]
    if this_machine().platform == "tpu":
        several = [count for count in several if count in TPU_LEASES]
    if request.device == COMPILER:
        several = (4, LARGEST) if model == DETAILED and name != REPLICATED else (LARGEST,)
    return (1, *several) if name == REPLICATED else several
