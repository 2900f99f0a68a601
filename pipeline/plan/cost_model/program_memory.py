"""What a compiled program holds of a chip, estimated from arrays alone: the analytic model. No JAX.

Arguments and results are counted exactly. What a program needs besides is arithmetic on the arrays
that its source makes, with a few constants in front that were fitted to what the TPU compiler says
of programs for a v5e chip (`python -m launch.bench plan`, which also says how far off it is).
XLA lays out more while it has room and squeezes near the limit, so none of this is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from configs.schema import Config
from pipeline.contracts.model_shape import DTYPE_BYTES, ModelShape
from pipeline.contracts.programs import SAMPLER, Devices, devices_of, split_name
from pipeline.contracts.topology import GIB, HBM_GIB

MemoryParts = dict[str, int]
"""Bytes of a chip by what they are for."""

_FLOAT = _INT = 4
_FAST = 112 * 2**20
"""A chip's fast memory that what a layer makes stays in, as far as it fits."""
_SMALL = 64 * 2**20
"""What a backward pass holds of many small arrays."""
_LOOP_LAYERS = 1.3
"""Weights, in layers, that decoding keeps another copy of around its loop."""
_KEPT_INPUTS = 3
"""Hidden states of the whole micro-batch that a backward pass has besides each layer's input."""
_WIDE = 3
"""Arrays of a layer's feed-forward width that exist at a time."""
_SCORES = 2
"""Arrays of attention scores, in float32, that exist at a time."""
_GATHERED, _GATHERED_AROUND_LOOPS, _GATHERED_BY_SEGMENTS = 0.9, 0.55, 0.66
"""Share of the layers whose weights are gathered over fsdp ahead of their use, while there is room;
the second where a backward pass takes the micro-batch in several parts, the third while a segment
is decoded."""
_LEAST_GATHERED = 4
"""Layers that are gathered ahead of their use in any case."""
_SAVED, _SAVED_BY_LOOPS = 3.3, 12
"""Arrays of a layer's feed-forward width that a backward pass without recomputation keeps; the
second where it takes the micro-batch in several parts, whose loop computes nothing twice."""
_BLOCK = 512  # queries whose scores exist at a time, as PackedAttention has it


@dataclass(frozen=True)
class ProcessArrays:
    """What all of a process's programs are made of.

    Attributes:
        config: the run; all its arrays are set.
        shape: its model.
        devices: the devices of the process.
        quantization: how the base is kept that its programs multiply with.
        adapted: whether they take an adapter; no: it is in the base.
    """

    config: Config
    shape: ModelShape
    devices: Devices
    quantization: str
    adapted: bool

    @staticmethod
    def of(config: Config, shape: ModelShape, program: str) -> ProcessArrays:
        """Of the process that runs a program."""
        devices = devices_of(config, program)
        if split_name(program)[0] not in SAMPLER:
            return ProcessArrays(config, shape, devices, config.model.quantization, adapted=True)
        merged = config.plan.rollout_weights == "merged"
        quantization = "none" if merged else config.sampler_quantization
        return ProcessArrays(config, shape, devices, quantization, adapted=not merged)

    @property
    def number(self) -> int:
        """Bytes of a number of the base's type."""
        return DTYPE_BYTES[self.config.model.dtype]

    @property
    def adapter(self) -> int:
        """Bytes of an adapter, which is float32 and on every device."""
        return _FLOAT * self.shape.adapter_parameters(self.config.lora)

    @property
    def base(self) -> int:
        """Bytes of the frozen base."""
        devices = self.devices
        return self.shape.base_bytes(
            self.config.model.dtype,
            quantization=self.quantization,
            fsdp=devices.fsdp,
            tp=devices.tp,
        )

    @property
    def hidden(self) -> int:
        """Feed-forward width that a device computes."""
        return self.shape.hidden // _divides(self.devices.tp, self.shape.hidden)

    @property
    def heads(self) -> int:
        """Query heads that a device computes."""
        return self.shape.heads // _divides(self.devices.tp, self.shape.heads)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values that a device keeps."""
        return self.shape.kv_heads // _divides(self.devices.tp, self.shape.kv_heads)

    def cache(self, positions: int) -> int:
        """Bytes of keys and values of so many positions in one layer."""
        per_head = 2 * self.shape.head_dim * self.number
        if self.config.plan.kv_cache == "int8":
            per_head = 2 * (self.shape.head_dim + _FLOAT)  # a byte each, and a scale
        return positions * self.kv_heads * per_head

    def caches(self, rows: int, positions: int) -> MemoryParts:
        """Of caches of so many rows of at most so many positions."""
        shape = self.shape
        near = min(shape.window, positions)
        return {
            "kv_local": rows * shape.local_layers * self.cache(near),
            "kv_global": rows * shape.global_layers * self.cache(positions),
        }

    @property
    def layer(self) -> int:
        """Bytes of a layer's matrices as they are multiplied: whole along fsdp, not in codes."""
        return self.shape.layer_bytes(self.config.model.dtype, tp=self.devices.tp)


def _divides(parts: int, size: int) -> int:
    """MemoryParts that an axis is split into: it stays whole where they do not divide it."""
    return parts if size % parts == 0 else 1


def program_memory(config: Config, shape: ModelShape, program: str) -> MemoryParts:
    """Bytes of each chip that a program holds while it runs, arguments and results included.

    The parts are `base`, `adapter`, `optimizer`, `kv_local`, `kv_global`, `activations`, `head` and
    `temporaries`; those that a program has nothing of are left out.

    Args:
        config: the run; all its arrays are set.
        shape: its model.
        program: by its name, see `pipeline.plan.cost_model.programs`.

    Raises:
        ValueError: if there is no such program.
    """
    kind, size = split_name(program)
    arrays = ProcessArrays.of(config, shape, program)
    parts = _KINDS[kind](arrays, size)
    if "base" in parts:
        ready = _prepared_weights(arrays, kind, size, sum(parts.values()))
        parts["temporaries"] = parts.get("temporaries", 0) + ready
    return parts


def _prepared_weights(arrays: ProcessArrays, kind: str, size: int, others: int) -> int:
    """Weights as they are multiplied, where they are kept otherwise.

    A matrix is computed back from its codes when it is needed. Layers are gathered over fsdp ahead
    of their use, many of them as long as a chip has room beside the program's `others`.
    """
    if arrays.devices.fsdp == 1:
        return arrays.layer if arrays.quantization != "none" else 0
    share = _GATHERED_BY_SEGMENTS if kind == "segment" else _GATHERED
    if kind in {"gradient", "imitation"} and _rows_together(arrays, size) < _local_rows(
        arrays, size
    ):
        share = _GATHERED_AROUND_LOOPS
    room = (int(HBM_GIB * GIB) - others) // arrays.layer
    return arrays.layer * max(_LEAST_GATHERED, min(int(share * arrays.shape.layers), room))


def slots_memory(arrays: ProcessArrays, slots: int) -> MemoryParts:
    """Of the slots of a sampler and of what was drawn in them; `slots` over all devices."""
    rollout, local = arrays.config.rollout, slots // arrays.devices.shards
    drawn = (3 if rollout.truncates else 2) * _FLOAT * rollout.max_new_tokens
    return {**arrays.caches(local, rollout.max_tokens), "temporaries": local * drawn}


def _empty(arrays: ProcessArrays, _: int) -> MemoryParts:
    return slots_memory(arrays, arrays.config.slots)


def _prefill(arrays: ProcessArrays, bucket: int) -> MemoryParts:
    rows = arrays.config.prefill_rows(bucket)
    return {
        **_weights(arrays),
        **arrays.caches(rows, bucket),
        "activations": _forward(arrays, rows, bucket, block=bucket),
    }


def _fill(arrays: ProcessArrays, bucket: int) -> MemoryParts:
    state = slots_memory(arrays, arrays.config.slots)
    prompts = arrays.caches(arrays.config.prefill_rows(bucket), bucket)
    return {name: size + prompts.get(name, 0) for name, size in state.items()}


def _segment(arrays: ProcessArrays, slots: int) -> MemoryParts:
    config, shape, local = arrays.config, arrays.shape, slots // arrays.devices.shards
    state, steps = slots_memory(arrays, slots), config.segment_steps
    recent = local * shape.layers * arrays.cache(steps)
    # While a layer's ring takes up what is recent there is a copy of it.
    longest = config.rollout.max_tokens
    if not shape.global_layers:
        longest = min(shape.window, longest)
    flushed = local * arrays.cache(longest)
    # The adapter in the base's type, and weights that are laid out anew.
    around = int(_LOOP_LAYERS * arrays.layer)
    around += arrays.adapter * arrays.number // _FLOAT if arrays.adapted else 0
    scores = local * arrays.heads * (config.rollout.max_tokens + steps) * _FLOAT
    return {
        **_weights(arrays),
        **state,
        "activations": _SCORES * scores + local * _WIDE * arrays.hidden * arrays.number,
        "head": _logits(arrays, local),
        "temporaries": state["temporaries"] + recent + flushed + around,
    }


def _score(arrays: ProcessArrays, rows: int) -> MemoryParts:
    local, seq = _local_rows(arrays, rows), arrays.config.row_tokens
    return {
        **_weights(arrays),
        "activations": _forward(arrays, local, seq, block=min(seq, _BLOCK)),
    }


def _keep(arrays: ProcessArrays, rows: int) -> MemoryParts:
    parts = _score(arrays, rows)
    tokens = _local_rows(arrays, rows) * arrays.config.row_tokens
    return parts | {"head": tokens * _top(arrays.config)}


def _gradient(arrays: ProcessArrays, rows: int) -> MemoryParts:
    config, shape = arrays.config, arrays.shape
    seq = config.row_tokens
    tokens = _local_rows(arrays, rows) * seq
    together = _rows_together(arrays, rows)
    part = _forward(arrays, together, seq, block=min(seq, _BLOCK))
    inputs = {"offload": 1}.get(config.plan.remat, shape.layers)
    kept = (inputs + _KEPT_INPUTS) * shape.embed * arrays.number
    in_parts = together < _local_rows(arrays, rows)
    kept += shape.layers * _saved(arrays, in_parts=in_parts) * arrays.number
    reference = tokens * _top(config) if config.learner.uses_reference_top_k else 0
    return {
        **_weights(arrays),
        # What is added to, and what is added.
        "optimizer": 2 * arrays.adapter,
        "activations": tokens * kept + part,
        "head": _logits(arrays, tokens) + reference,
        "temporaries": _SMALL,
    }


def _apply(arrays: ProcessArrays, _: int) -> MemoryParts:
    return {"adapter": arrays.adapter, "optimizer": 3 * arrays.adapter}


_KINDS: dict[str, Callable[[ProcessArrays, int], MemoryParts]] = {
    "empty": _empty,
    "prefill": _prefill,
    "fill": _fill,
    "segment": _segment,
    "score": _score,
    "keep": _keep,
    "gradient": _gradient,
    "imitation": _gradient,
    "apply": _apply,
}


def _weights(arrays: ProcessArrays) -> MemoryParts:
    return {"base": arrays.base, "adapter": arrays.adapter if arrays.adapted else 0}


def _forward(arrays: ProcessArrays, rows: int, seq: int, *, block: int) -> int:
    """What a layer makes of so many rows at a time besides what it is given and returns."""
    shape = arrays.shape
    wide = _WIDE * arrays.hidden + 2 * shape.embed + 2 * arrays.heads * shape.head_dim
    scores = rows * arrays.heads * block * seq * _FLOAT
    return max(0, rows * seq * wide * arrays.number + _SCORES * scores - _FAST)


def _local_rows(arrays: ProcessArrays, rows: int) -> int:
    """Rows of a device."""
    return rows // arrays.devices.shards


def _rows_together(arrays: ProcessArrays, rows: int) -> int:
    """Rows that a layer works on at a time in the gradient, as MemoryParts.of has it."""
    local = _local_rows(arrays, rows)
    most = max(1, arrays.config.plan.layer_tokens // arrays.config.row_tokens)
    return max(size for size in range(1, local + 1) if local % size == 0 and size <= most)


def _saved(arrays: ProcessArrays, *, in_parts: bool) -> int:
    """Numbers that a layer keeps of a position for the backward pass, besides its input."""
    shape, remat = arrays.shape, arrays.config.plan.remat
    if remat == "none":
        return int((_SAVED_BY_LOOPS if in_parts else _SAVED) * arrays.hidden)
    if remat == "dots":
        attention = arrays.heads * shape.head_dim + 2 * arrays.kv_heads * shape.head_dim
        # The product with a matrix, and the one with its adapter, which is added to it.
        return 2 * (attention + 2 * arrays.hidden + 2 * shape.embed)
    return 0


def _logits(arrays: ProcessArrays, tokens: int) -> int:
    """Of a block of positions and vocabulary, in float32."""
    plan, devices = arrays.config.plan, arrays.devices
    vocab = min(plan.head_vocab, arrays.shape.vocab // (devices.fsdp * devices.tp))
    return min(plan.head_tokens, tokens) * vocab * _FLOAT


def _top(config: Config) -> int:
    """Bytes of what is kept of the likeliest tokens of a position."""
    number = DTYPE_BYTES[config.learner.top_k_dtype]
    return config.learner.kl_top_k * (number + _INT) + _FLOAT
