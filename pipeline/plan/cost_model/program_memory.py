"""Analytic model of the memory that a compiled program uses on a chip. No JAX.

Arguments and results are counted exactly. Temporaries are computed from the arrays in the program's
source with constants fitted to the TPU compiler's reports for v5e chips; docs/benchmarks.md has the
errors. XLA uses more memory where much is free and less near the limit, so the model is
approximate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from configs.plan import HEAD_TOKENS, HEAD_VOCAB, LAYER_TOKENS
from configs.schema import Config
from pipeline.data.models.model_shape import DTYPE_BYTES, ModelShape
from pipeline.plan.program_names import SAMPLER, Devices, devices_of, split_name
from pipeline.plan.topology import GIB, HBM_GIB

MemoryParts = Counter[str]
"""Bytes of a chip by part; 0 for a part that is absent."""

_FLOAT = _INT = 4
_FAST = 112 * 2**20
"""Fast memory of a chip, which holds a layer's intermediate arrays as far as they fit."""
_SMALL = 64 * 2**20
"""Memory of many small arrays in a backward pass."""
_LOOP_LAYERS = 1.3
"""Size, in layers, of the second copy of weights around the decode loop."""
_KEPT_INPUTS = 3
"""Hidden states of the whole micro-batch, or gradients of them, that a backward pass holds besides
each layer's input."""
_WIDE = 3
"""Arrays of a layer's feed-forward width that exist at the same time."""
_SCORES = 2
"""Float32 arrays of attention scores that exist at the same time."""
_GATHERED, _GATHERED_AROUND_LOOPS, _GATHERED_BY_SEGMENTS = 0.9, 0.55, 0.66
"""Share of the layers whose weights are prefetched over fsdp if they fit: in general, in a backward
pass that splits the micro-batch, and in a decode segment."""
_LEAST_GATHERED = 4
"""Layers that are always prefetched."""
_SAVED, _SAVED_BY_LOOPS = 3.3, 12
"""Arrays of a layer's feed-forward width that a backward pass without recomputation saves: in
general, and where it splits the micro-batch and its loop recomputes nothing."""
_SAVED_BY_TP = 7
"""Arrays of the model's width that a backward pass without recomputation saves of a layer besides,
if tp > 1: what is summed over chips is not computed again. Fitted to Gemma 4 E4B with tp = 4."""
_BLOCK = 512  # queries whose scores exist at the same time, as in PackedAttention


@dataclass(frozen=True)
class ProcessArrays:
    """Arrays that the programs of a process are built from, by their bytes.

    `quantization` is that of the base in its programs; if they are not `adapted`, the adapter is
    merged into the base. The configuration has all sizes.
    """

    config: Config
    shape: ModelShape
    devices: Devices
    quantization: str
    adapted: bool

    @staticmethod
    def of(config: Config, shape: ModelShape, program: str) -> ProcessArrays:
        """Arrays of the process that runs a program."""
        devices = devices_of(config, program)
        if split_name(program)[0] not in SAMPLER:
            return ProcessArrays(config, shape, devices, config.model.quantization, adapted=True)
        merged = config.plan.rollout_weights == "merged"
        quantization = "none" if merged else config.sampler_quantization
        return ProcessArrays(config, shape, devices, quantization, adapted=not merged)

    @property
    def number(self) -> int:
        """Bytes of a number of the model's dtype."""
        return DTYPE_BYTES[self.config.model.dtype]

    @property
    def adapter(self) -> int:
        """Bytes of an adapter, which is float32 and replicated."""
        return _FLOAT * self.shape.adapter_parameters(self.config.lora)

    @property
    def base(self) -> int:
        """Bytes of the frozen base."""
        model, in_host = self.config.model, self.config.plan.embeddings_in_host
        return _base_bytes(
            self.shape, model.dtype, self.quantization, self.devices, in_host=in_host
        )

    @property
    def unread(self) -> MemoryParts:
        """Bytes of the matrices that a prefill does not take, of base and adapter."""
        whole, part = (
            shape.layers_bytes(
                self.config.model.dtype,
                quantization=self.quantization,
                fsdp=self.devices.fsdp,
                tp=self.devices.tp,
            )
            for shape in (self.shape, self.shape.prefilled)
        )
        adapter = _FLOAT * self.shape.adapter_parameters(self.config.lora, prefilled=True)
        return MemoryParts(base=whole - part, adapter=self.adapter - adapter if self.adapted else 0)

    @property
    def hidden(self) -> int:
        """Feed-forward width of a device, of the widest layer."""
        return max(_widths(self.shape, self.devices.tp))

    def hidden_of(self, layer: int) -> int:
        """Feed-forward width of a layer on a device."""
        return _widths(self.shape, self.devices.tp)[layer]

    @property
    def head_dim(self) -> int:
        """Width of a head, of the layers with the widest."""
        return max(self.shape.head_dim, self.shape.global_head_dim or 0)

    @property
    def heads(self) -> int:
        """Query heads of a device."""
        return self.shape.heads // _divides(self.devices.tp, self.shape.heads)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values of a device."""
        return self.shape.kv_heads // _divides(self.devices.tp, self.shape.kv_heads)

    def cache(self, positions: int, *, local: bool) -> int:
        """Bytes of the keys and values of `positions` positions of a local or global layer."""
        shape = self.shape
        width = shape.head_dim if local else shape.global_head_dim or shape.head_dim
        per_head = 2 * width * self.number
        if self.config.plan.kv_cache == "int8":
            per_head = 2 * (width + _FLOAT)  # a byte per number, and a scale
        return positions * self.kv_heads * per_head

    def ring(self, positions: int, *, local: bool) -> int:
        """Bytes of such a layer's ring for a row of at most `positions` positions."""
        return self.cache(min(self.shape.window, positions) if local else positions, local=local)

    def caches(self, rows: int, positions: int) -> MemoryParts:
        """Bytes of the ring caches of `rows` rows of at most `positions` positions."""
        local, whole = self._with_kv
        return MemoryParts(
            kv_local=rows * local * self.ring(positions, local=True),
            kv_global=rows * whole * self.ring(positions, local=False),
        )

    def recent(self, rows: int, steps: int) -> int:
        """Bytes of the recent ring caches of `rows` rows in segments of `steps` steps."""
        local, whole = self._with_kv
        per_row = local * self.cache(steps, local=True) + whole * self.cache(steps, local=False)
        return rows * per_row

    @property
    def _with_kv(self) -> tuple[int, int]:
        """Numbers of local and of global layers that have keys and values of their own."""
        layers = self.shape.kv_layers
        local = sum(self.shape.local[: len(layers)])
        return local, len(layers) - local

    def caches_read(self, positions: int) -> int:
        """Bytes of keys and values that all layers read for a position of a row.

        A ring is read by each layer that attends to it.
        """
        shape = self.shape
        local = shape.local_layers * self.ring(positions, local=True)
        return local + shape.global_layers * self.ring(positions, local=False)

    @property
    def layer(self) -> int:
        """Bytes of the largest layer's matrices in products: gathered over fsdp, dequantized."""
        return _largest_layer(self.shape, self.config.model.dtype, self.devices.tp)


@lru_cache
def _widths(shape: ModelShape, tp: int) -> tuple[int, ...]:
    widths = map(shape.hidden_of, range(shape.layers))
    return tuple(width // _divides(tp, width) for width in widths)


@lru_cache
def _base_bytes(
    shape: ModelShape, dtype: str, quantization: str, devices: Devices, *, in_host: bool
) -> int:
    return shape.base_bytes(
        dtype,
        quantization=quantization,
        fsdp=devices.fsdp,
        tp=devices.tp,
        data=devices.shards // devices.fsdp,
        in_host=in_host,
    )


@lru_cache
def _largest_layer(shape: ModelShape, dtype: str, tp: int) -> int:
    return max(shape.layer_bytes(layer, dtype, tp=tp) for layer in range(shape.layers))


def _divides(parts: int, size: int) -> int:
    """Number of shards of an axis; an axis that `parts` does not divide is replicated."""
    return parts if size % parts == 0 else 1


def program_memory(config: Config, shape: ModelShape, program: str) -> MemoryParts:
    """Bytes of a chip that a program uses while it runs, arguments and results included.

    Parts are those of `memory.PARTS`, names those of `pipeline.plan.program_names`.
    """
    kind, size = split_name(program)
    arrays = ProcessArrays.of(config, shape, program)
    parts = _KINDS[kind](arrays, size)
    if "base" in parts:
        parts["temporaries"] += _prepared_weights(arrays, kind, size, parts.total())
    return parts


def _prepared_weights(arrays: ProcessArrays, kind: str, size: int, others: int) -> int:
    """Bytes of weights that are dequantized or gathered for matrix products.

    A quantized matrix is dequantized when it is used. Layers are prefetched over fsdp, as many as
    fit on a chip besides the program's `others` bytes.
    """
    if arrays.devices.fsdp == 1:
        return arrays.layer if arrays.quantization != "none" else 0
    share = _GATHERED_BY_SEGMENTS if kind == "segment" else _GATHERED
    if kind in {"gradient", "sft_gradient"} and _rows_together(arrays, size) < _local_rows(
        arrays, size
    ):
        share = _GATHERED_AROUND_LOOPS
    room = (int(HBM_GIB * GIB) - others) // arrays.layer
    return arrays.layer * max(_LEAST_GATHERED, min(int(share * arrays.shape.layers), room))


def slots_memory(arrays: ProcessArrays, slots: int) -> MemoryParts:
    """Memory of a sampler's `slots` slots over all devices, and of their tokens."""
    rollout, local = arrays.config.rollout, slots // arrays.devices.shards
    tokens = (3 if rollout.truncates else 2) * _FLOAT * rollout.max_new_tokens
    return arrays.caches(local, rollout.max_tokens) + MemoryParts(temporaries=local * tokens)


def _empty(arrays: ProcessArrays, _: int) -> MemoryParts:
    return slots_memory(arrays, arrays.config.slots)


def _prefill(arrays: ProcessArrays, bucket: int) -> MemoryParts:
    rows = arrays.config.prefill_rows(bucket)
    part = replace(arrays, shape=arrays.shape.prefilled)
    activations = _forward(part, rows, bucket, block=bucket)
    weights = _weights(arrays) - arrays.unread
    return weights + arrays.caches(rows, bucket) + MemoryParts(activations=activations)


def _fill(arrays: ProcessArrays, bucket: int) -> MemoryParts:
    config = arrays.config
    return slots_memory(arrays, config.slots) + arrays.caches(config.prefill_rows(bucket), bucket)


def _segment(arrays: ProcessArrays, slots: int) -> MemoryParts:
    config, shape, local = arrays.config, arrays.shape, slots // arrays.devices.shards
    steps = config.segment_steps
    recent = arrays.recent(local, steps)
    # The adapter in the model's dtype, and weights in another layout.
    around = int(_LOOP_LAYERS * arrays.layer)
    around += arrays.adapter * arrays.number // _FLOAT if arrays.adapted else 0
    scores = local * arrays.heads * (config.rollout.max_tokens + steps) * _FLOAT
    # Of replicated kv heads, a device copies those that its query heads attend to.
    shares = gcd(shape.kv_heads, arrays.devices.tp) if arrays.kv_heads == shape.kv_heads else 1
    rings = arrays.caches(local, config.rollout.max_tokens).total()
    copied = rings // shares if shares > 1 else 0
    own = MemoryParts(
        activations=_SCORES * scores + local * _WIDE * arrays.hidden * arrays.number,
        head=_logits(arrays, local),
        temporaries=recent + around + copied,
    )
    return _weights(arrays) + slots_memory(arrays, slots) + own


def _score(arrays: ProcessArrays, rows: int) -> MemoryParts:
    local, seq = _local_rows(arrays, rows), arrays.config.row_tokens
    return _weights(arrays) + MemoryParts(
        activations=_forward(arrays, local, seq, block=min(seq, _BLOCK))
    )


def _reference_top_k(arrays: ProcessArrays, rows: int) -> MemoryParts:
    tokens = _local_rows(arrays, rows) * arrays.config.row_tokens
    return _score(arrays, rows) + MemoryParts(head=tokens * _top(arrays.config))


def _gradient(arrays: ProcessArrays, rows: int) -> MemoryParts:
    config, shape = arrays.config, arrays.shape
    seq = config.row_tokens
    tokens = _local_rows(arrays, rows) * seq
    together = _rows_together(arrays, rows)
    part = _forward(arrays, together, seq, block=min(seq, _BLOCK))
    inputs = {"offload": 1}.get(config.plan.remat, shape.layers)
    kept = (inputs + _KEPT_INPUTS) * shape.embed * arrays.number
    in_parts = together < _local_rows(arrays, rows)
    layers = range(shape.layers)
    kept += sum(_saved(arrays, n, in_parts=in_parts) for n in layers) * arrays.number
    kept += _shared(arrays) * arrays.number
    reference = tokens * _top(config) if config.learner.uses_reference_top_k else 0
    return _weights(arrays) + MemoryParts(
        optimizer=2 * arrays.adapter,  # the accumulated gradient and the one to add
        activations=tokens * kept + part,
        head=_logits(arrays, tokens) + reference,
        temporaries=_SMALL,
    )


def _apply(arrays: ProcessArrays, _: int) -> MemoryParts:
    return MemoryParts(adapter=arrays.adapter, optimizer=3 * arrays.adapter)


_KINDS: dict[str, Callable[[ProcessArrays, int], MemoryParts]] = {
    "empty": _empty,
    "prefill": _prefill,
    "fill": _fill,
    "segment": _segment,
    "score": _score,
    "reference_top_k": _reference_top_k,
    "gradient": _gradient,
    "sft_gradient": _gradient,
    "apply": _apply,
}


def _weights(arrays: ProcessArrays) -> MemoryParts:
    return MemoryParts(base=arrays.base, adapter=arrays.adapter if arrays.adapted else 0)


def _forward(arrays: ProcessArrays, rows: int, seq: int, *, block: int) -> int:
    """Bytes of a layer's intermediate arrays for `rows` rows, without its input and output."""
    shape = arrays.shape
    wide = _WIDE * arrays.hidden + 2 * shape.embed + 2 * arrays.heads * arrays.head_dim
    scores = rows * arrays.heads * block * seq * _FLOAT
    return max(0, rows * seq * wide * arrays.number + _SCORES * scores - _FAST)


def _local_rows(arrays: ProcessArrays, rows: int) -> int:
    """Rows of a device."""
    return rows // arrays.devices.shards


def _rows_together(arrays: ProcessArrays, rows: int) -> int:
    """Rows that a layer of the gradient program processes together."""
    local = _local_rows(arrays, rows)
    most = max(1, LAYER_TOKENS // arrays.config.row_tokens)
    return max(size for size in range(1, local + 1) if local % size == 0 and size <= most)


def _saved(arrays: ProcessArrays, layer: int, *, in_parts: bool) -> int:
    """Numbers per position that a layer saves for the backward pass, besides its input."""
    shape, remat, hidden = arrays.shape, arrays.config.plan.remat, arrays.hidden_of(layer)
    if remat == "none":
        summed = _SAVED_BY_TP * shape.embed if arrays.devices.tp > 1 else 0
        return int((_SAVED_BY_LOOPS if in_parts else _SAVED) * hidden) + summed
    if remat == "dots":
        heads = arrays.heads + 2 * arrays.kv_heads * shape.has_kv(layer)
        attention = heads * shape.head_dim_of(layer)
        # The matrix product, and that of the adapter, which is added to it.
        return 2 * (attention + 2 * hidden + 2 * shape.embed)
    return 0


def _shared(arrays: ProcessArrays) -> int:
    """Numbers per position that a gradient keeps for several layers.

    The inputs of all layers that depend on the token, and keys and values of layers that later ones
    attend to, with their gradients.
    """
    shape = arrays.shape
    widths = (shape.head_dim_of(n) for n in shape.shared_sources)
    key_value = sum(2 * 2 * arrays.kv_heads * width for width in widths)
    return key_value + shape.layers * shape.per_layer_input


def _logits(arrays: ProcessArrays, tokens: int) -> int:
    """Bytes of a float32 block of positions and vocabulary."""
    devices = arrays.devices
    vocab = min(HEAD_VOCAB, arrays.shape.vocab // (devices.fsdp * devices.tp))
    return min(HEAD_TOKENS, tokens) * vocab * _FLOAT


def _top(config: Config) -> int:
    """Bytes of a position's reference top k."""
    return config.learner.kl_top_k * (_FLOAT + _INT) + _FLOAT
