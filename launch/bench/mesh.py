"""`python -m launch.bench mesh`: a model on 1 to 8 devices by data, tensor and layer parallelism.

The batch grows with the devices, as in a run: `slots` rollouts and `rows` sequences a device, with
sequences no longer than the sliding window. All layouts have the same batch on the same devices.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure

from configs.schema import Config
from launch.bench.harness import Benchmark, Figures, Row, Section
from launch.bench.layer_split import STAGE, LayerSplit
from launch.bench.shapes import COMPILER, SHAPES, chosen_models, config_of
from launch.bench.small_gemma import VOCABULARY
from launch.bench.v5e import figures, traced_figures
from pipeline.compute.aot.compile import v5e_devices
from pipeline.compute.decode.cache import ring_slots
from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.device_memory import program_bytes
from pipeline.compute.learner.batches import Inputs, place_inputs
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.learner.timing import fastest_s, full_micro_batch, plain_token
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.attention import Layout, PackedAttention
from pipeline.compute.model.head import Head
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import (
    in_host,
    lowered,
    make_mesh,
    replicated,
)
from pipeline.data.models.find_shape import PUBLISHED
from pipeline.data.models.hf_config import read_model_shape, text_config
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.cost_model.roofline import HOST_BYTES_PER_S
from pipeline.plan.topology import GIB, TPU_COMPILER

DECODE, GRADIENT = "decode", "gradient"
REPLICATED, FSDP, TENSOR = "replicated", "fsdp", "tensor parallel"
SPLIT, GPIPE, STREAMED = "layer split", "GPipe", "streamed"
LAYOUTS = (REPLICATED, FSDP, TENSOR, SPLIT, GPIPE, STREAMED)
DETAILED = "gemma3-1b"
"""The model that is also compiled for 4 devices; the others only for 8."""
COUNTS = (1, 2, 4, 8)
LARGEST = COUNTS[-1]
SIZES = {"prompt": 256, "new": 256, "slots": 32, "rows": 4}
QUICK = {"prompt": 32, "new": 32, "slots": 8, "rows": 2}
"""Tokens of a prompt and of a completion; slots and rows of a device."""
TIERS_GIB = (16, 24, 80)
FITTED = (
    *((REPLICATED, 1), (STREAMED, 1)),
    *((FSDP, LARGEST), (TENSOR, LARGEST), (SPLIT, LARGEST)),
)
ROOM = 0.9
"""Share of a tier for base and caches; the rest is for adapter, optimizer and temporaries."""
_HOST_ROOM = 0.7
"""Share of the host's free memory that virtual devices may take."""


class Streamed(Policy):
    """A policy whose layers' matrices are in host memory and copied in each step.

    ZeRO-Inference (arXiv:2207.00032): every device copies all of them.
    """

    def abstract_params(self) -> tuple[Params, Params]:
        """See `Policy.abstract_params`."""
        base, adapter = super().abstract_params()
        place = in_host(self.mesh)
        moved = {
            name: base[name].update(sharding=place) for name in base if _is_streamed(base, name)
        }
        return base | moved, adapter

    def bind(self, base: Params, *args: Any, **settings: Any) -> Any:
        """See `Policy.bind`."""
        space = jax.memory.Space.Device
        moved = {
            name: jax.device_put(base[name], space) for name in base if _is_streamed(base, name)
        }
        return super().bind(base | moved, *args, **settings)


def _is_streamed(base: Params, name: str) -> bool:
    return name.startswith("layers.") and base[name].ndim > 1


def cost(
    traced: jax.stages.Traced,
    mesh: Mesh,
    *,
    compiled: bool,
    again: Callable[[Any], Any] | None = None,
    inputs: Inputs | None = None,
    trips: float | None = None,
) -> tuple[float, float] | None:
    """Seconds of a program and GiB of a device; None: it does not fit.

    Args:
        traced: the program.
        mesh: its devices.
        compiled: whether the TPU compiler answers; otherwise it is timed.
        again: the next third argument from a result; None: the program does not overwrite it.
        inputs: of the batch that is the last argument; times do not depend on other values.
        trips: expected trip count of loops whose own depends on the arguments.
    """
    if compiled:
        found = traced_figures(traced, trips=trips)
        return (found["ms"] / 1e3, found["gib"]) if found["fits"] else None
    program = lowered(traced, mesh).compile()
    needed = program_bytes(program)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and needed * mesh.size > _HOST_ROOM * psutil.virtual_memory().available:
        return None
    arguments = list(jax.tree.map(_constant, program.args_info[0], program.input_shardings[0]))
    if inputs is not None:
        arguments[-1] = replace(arguments[-1], inputs=inputs)

    def work() -> None:
        found = jax.block_until_ready(program(*arguments))
        if again is not None:
            arguments[2] = again(found)

    return fastest_s(work), needed / GIB


def _constant(shape: Any, place: jax.sharding.Sharding) -> jax.Array:
    value = 0.01 if jnp.issubdtype(shape.dtype, jnp.floating) else 1
    return jax.device_put(np.full(shape.shape, value, shape.dtype), place)


def layout(
    *, model: str, device: str, name: str, devices: int, sizes: Mapping[str, int]
) -> Figures:
    """Tokens a second of decoding, positions a second of the gradient, and their memory."""
    compiled = device == COMPILER
    chips = v5e_devices(devices) if compiled else jax.devices()[:devices]
    if len(chips) < devices:
        return {"how": f"there are {len(chips)} devices"}
    config = _config(model, device, name, devices, sizes)
    done = {
        DECODE: config.slots * config.segment_steps,
        GRADIENT: sizes["rows"] * devices * config.row_tokens,
    }
    how = "compiled for a v5e" if compiled else f"measured on {chips[0].device_kind}"
    found: dict[str, Any] = {"how": how}
    for work in (DECODE,) if name == STREAMED else (DECODE, GRADIENT):
        one = _cost(model, config, name, work, chips, compiled=compiled)
        found[work] = one and done[work] / one[0]
        found[f"{work} GiB"] = one and one[1]
    return found


def _config(model: str, device: str, name: str, count: int, sizes: Mapping[str, int]) -> Config:
    split = {FSDP: {"plan__fsdp": count}, REPLICATED: {}, STREAMED: {}}
    return config_of(
        model,
        device=device,
        slots=sizes["slots"] * count,
        prompt=sizes["prompt"],
        new=sizes["new"],
        plan__learner_devices=count,
        plan__micro_batch_tokens=sizes["rows"] * count * (sizes["prompt"] + sizes["new"]),
        plan__attention="blocked",
        **split.get(name, {"plan__tp": count}),
    )


def _cost(
    model: str, config: Config, name: str, work: str, chips: Sequence[jax.Device], *, compiled: bool
) -> tuple[float, float] | None:
    """Seconds and GiB of a segment or a gradient; None: it does not fit."""
    rows = config.plan.micro_batch_tokens // config.row_tokens
    if compiled and name in {REPLICATED, FSDP, TENSOR}:
        program = f"segment {config.slots}" if work == DECODE else f"gradient {rows}"
        found = figures(config, program)
        return (found["ms"] / 1e3, found["gib"]) if found["fits"] else None
    kind: Callable[..., Policy] = Streamed if name == STREAMED else Policy
    if name in {SPLIT, GPIPE}:
        groups = 1 if name == SPLIT else len(chips) if work == DECODE else rows
        kind = partial(LayerSplit, micro_batches=groups)
    policy = kind(
        architecture(SHAPES[model], dtype=jnp.dtype(config.model.dtype)),
        lora=config.lora,
        mesh=make_mesh(chips, fsdp=config.plan.fsdp, tp=config.plan.tp),
    )
    run = partial(cost, mesh=policy.mesh, compiled=compiled)
    if work == GRADIENT:
        learner = LearnerPrograms(policy, config, VOCABULARY)
        token = plain_token(VOCABULARY)
        full = full_micro_batch(config, shape=learner.shape, token=token)
        return run(
            learner.trace_gradient(rows),
            again=lambda found: found[0],
            inputs=None if compiled else place_inputs(full, policy.mesh),
            trips=learner.expected_blocks(GRADIENT, rows),
        )
    if isinstance(policy, LayerSplit):
        return run(_trace_decode(policy, config))
    sampler = DecodePrograms(policy, config, VOCABULARY)
    one = run(sampler.trace_segment(config.slots), again=lambda state: state)
    if one is None or name != STREAMED or not compiled:
        return one
    base, _ = policy.abstract_params()
    copied = _whole_bytes([x for path, x in base.items() if _is_streamed(base, path)])
    return max(one[0], config.segment_steps * copied / HOST_BYTES_PER_S), one[1]


def _trace_decode(policy: LayerSplit, config: Config) -> jax.stages.Traced:
    """`LayerSplit.decode` of a segment."""
    shape, plan, mesh = policy.architecture.shape, config.plan, policy.mesh
    numbers = jax.ShapeDtypeStruct((config.slots,), jnp.int32, sharding=replicated(mesh))
    (length,) = set(ring_slots(policy.architecture, max_tokens=config.rollout.max_tokens))
    ring = jax.ShapeDtypeStruct(
        (policy.slots, config.slots, shape.kv_heads, length, shape.head_dim),
        policy.architecture.config.param_dtype,
        sharding=NamedSharding(mesh, PartitionSpec(STAGE)),
    )
    head = Head(shape.final_softcap, 1.0, plan.head_tokens, plan.head_vocab, mesh)
    decode = partial(policy.decode, head=head, steps=config.segment_steps)
    return policy.jit(decode).trace(*policy.abstract_params(), numbers, numbers, (ring, ring))


def bubble(
    *, model: str, device: str, stages: int, micro_batches: Sequence[int], sizes: Mapping[str, int]
) -> Figures:
    """The share of time that a pipeline of one row a micro-batch computes nothing of use.

    A further micro-batch takes one more slot of time, `slot_ms`: of m micro-batches all but m slots
    are bubble. Only the layers are timed, forward and backward. Devices compute in the bubble, too,
    so that it takes its time also on virtual devices that share cores.
    """
    compiled = device == COMPILER
    chips = v5e_devices(stages) if compiled else jax.devices()[:stages]
    config = _config(model, device, GPIPE, stages, sizes)
    shape = architecture(SHAPES[model], dtype=jnp.dtype(config.model.dtype))
    seconds = dict[int, float]()
    for count in micro_batches:
        mesh = make_mesh(chips, tp=stages)
        policy = LayerSplit(shape, lora=config.lora, mesh=mesh, micro_batches=count)
        rows = jax.ShapeDtypeStruct(
            (count, config.row_tokens), jnp.int32, sharding=replicated(mesh)
        )
        program = policy.jit(partial(_layers_gradient, policy))
        traced = program.trace(*policy.abstract_params(), rows)
        one = cost(traced, mesh, compiled=compiled)
        assert one is not None, count
        seconds[count] = one[0]
    *_, few, many = micro_batches
    slot_s = (seconds[many] - seconds[few]) / (many - few)
    found = {f"{m}": 1 - m * slot_s / seconds[m] for m in micro_batches}
    expected = {f"(p - 1) / ({m} + p - 1)": (stages - 1) / (m + stages - 1) for m in micro_batches}
    return {"slot_ms": 1e3 * slot_s, **found, **expected}


def _layers_gradient(policy: Policy, base: Params, adapter: Params, tokens: jax.Array) -> Params:
    """Gradient of the adapter through the layers alone."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = PackedAttention(Layout(positions, jnp.ones_like(positions)))

    def loss(adapter: Params) -> jax.Array:
        hidden, _ = policy.bind(base, adapter)(tokens, positions, attend=attend)
        return hidden.astype(jnp.float32).sum()

    return jax.grad(loss)(adapter)


def largest(*, tier_gib: float) -> Figures:
    """The largest Gemma 2 or 3 in bfloat16 whose base and caches fit, by layout and devices."""
    models = {name: read_model_shape(text_config(hf)) for name, hf in PUBLISHED.items()}
    found = {}
    for name, devices in FITTED:
        sizes = {
            shape.parameters: model
            for model, shape in models.items()
            if not shape.value_norm and _bytes(shape, name, devices) <= ROOM * tier_gib * GIB
        }
        found[f"{name}, {devices}"] = sizes[max(sizes)]
    return found


def _bytes(shape: ModelShape, name: str, devices: int) -> float:
    """Bytes of a device's share of the base, its temporary copies, and its caches."""
    kind, whole = "bfloat16", shape.base_bytes("bfloat16", quantization="none")
    layer = max(shape.layer_bytes(number, kind, tp=1) for number in range(shape.layers))
    outside = whole - shape.layers_bytes(kind, quantization="none", fsdp=1, tp=1)
    tokens = SIZES["slots"] * (SIZES["prompt"] + SIZES["new"])
    caches = tokens * shape.layers * 2 * 2 * shape.kv_heads * shape.head_dim
    stage = -(-shape.layers // devices)
    if name == SPLIT:
        return outside / devices + stage * layer + stage * devices / shape.layers * caches
    if name == FSDP:
        return whole / devices + layer + caches
    if name == TENSOR:
        parted = shape.kv_heads % devices == 0
        base = shape.base_bytes(kind, quantization="none", tp=devices)
        return base + caches * (1 if parted else devices)
    return (outside + 2 * layer if name == STREAMED else whole) + caches


def _whole_bytes(arrays: Any) -> int:
    """Bytes of arrays over all devices, each part once."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def draw(found: Mapping[str, Figures]) -> Figure:
    """Rates against devices, by model, and each layout's share of the replicated one's at last."""
    rates = {
        (*name.split(", ")[:2], int(name.split(", ")[2])): figures_of_row
        for name, figures_of_row in found.items()
    }
    models = list(dict.fromkeys(model for model, _, _ in rates))
    figure = Figure(figsize=(4.2 * (len(models) + 1), 7), layout="constrained")
    panes = figure.subplots(2, len(models) + 1)
    for row, work in zip(panes, (DECODE, GRADIENT), strict=True):
        for (number, model), (place, name) in product(enumerate(models), enumerate(LAYOUTS)):
            points = {
                count: rate
                for one, count in ((REPLICATED, 1), *((name, count) for count in COUNTS))
                if (rate := rates.get((model, one, count), {}).get(work)) is not None
            }
            row[number].plot(
                *zip(*sorted(points.items()), strict=True), "o-", color=f"C{place}", label=name
            )
            whole = rates.get((model, REPLICATED, LARGEST), {}).get(work)
            if whole is not None and LARGEST in points:
                share = points[LARGEST] / whole
                row[-1].bar(number + 0.16 * (place - 2), share, 0.15, color=f"C{place}")
            row[number].set(title=model, xlabel="devices", ylabel=f"{work}: tokens a second")
            row[number].set(xscale="log", yscale="log")
            row[number].set_xticks(COUNTS, COUNTS)
            row[number].grid(alpha=0.3)
        row[-1].set_xticks(range(len(models)), models)
        row[-1].set(title=f"{work}, {LARGEST} devices: rate over replicated")
        row[-1].grid(axis="y", alpha=0.3)
    panes[0][0].legend(fontsize="small")
    return figure


def benchmark(request: argparse.Namespace) -> Benchmark:
    """A row for each model and layout, the bubble of a pipeline, and the largest models."""
    compiled, quick = request.device == COMPILER, request.quick
    models, sizes = chosen_models(request), QUICK if quick else SIZES
    virtual = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={LARGEST}"
    on_host = {"XLA_FLAGS": virtual}
    given = {"device": request.device, "sizes": sizes}
    layouts = [
        Row(
            f"{model}, {name}, {count}",
            layout,
            {**given, "model": model, "name": name, "devices": count},
        )
        for model in models
        for name in LAYOUTS
        for count in _devices(model, name, request)
    ]
    stages, micro_batches = (4, (1, 2, 4, 8, 16)) if not compiled else (8, (1, 8, 32, 64))
    bubbles = [
        Row(
            f"{model}, {stages} stages",
            bubble,
            {**given, "model": model, "stages": stages, "micro_batches": micro_batches},
        )
        for model in models
        if not compiled or model == DETAILED
    ]
    environment = TPU_COMPILER if compiled else on_host
    length = f"{sizes['prompt']} + {sizes['new']} tokens"
    return Benchmark(
        (
            Section(
                "layouts",
                f"Tokens a second by layout and devices; {sizes['slots']} slots and "
                f"{sizes['rows']} rows a device, {length}",
                layouts,
                environment=environment,
                draw=draw,
            ),
            Section(
                "bubble",
                "Share of a pipeline's time in the bubble by micro-batches of one row, forward and "
                "backward, and the share that is expected",
                bubbles,
                environment=environment,
            ),
            Section(
                "largest",
                "The largest model by memory of a device, layout and devices",
                [Row(f"{tier} GiB", largest, {"tier_gib": tier}) for tier in TIERS_GIB],
            ),
        ),
        needs_compiler=compiled,
    )


def _devices(model: str, name: str, request: argparse.Namespace) -> Sequence[int]:
    """Numbers of devices; a process of a run has 1, 4 or 8 chips of a v5e-8."""
    if name == STREAMED:
        return (1,)
    counts = COUNTS if request.device != COMPILER else (4, 8) if model == DETAILED else (8,)
    if request.quick:
        counts = (2, 8)
    return (1, *counts[-1:]) if name == REPLICATED else counts
