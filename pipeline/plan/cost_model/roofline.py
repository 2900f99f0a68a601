"""Roofline model of program times.

The least time is the roofline (https://doi.org/10.1145/1498765.1498785): operations or bytes by the
chip's limits, whichever takes longer. The expected time uses shares of these limits, and seconds of
work outside of the matrix unit, fitted to compiled programs of Gemma 3 for a v5e by the compiler's
estimate and schedule (`launch.plan --verify`). The shares were not measured on a TPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from configs.schema import Config
from pipeline.data.batching import Packing
from pipeline.data.models.model_shape import DTYPE_BYTES, ModelShape
from pipeline.plan.cost_model.hardware import Chip
from pipeline.plan.cost_model.program_memory import ProcessArrays
from pipeline.plan.program_names import split_name

Regime = Literal["compute", "bandwidth", "links", "latency"]
"""The limiting resource of a phase: arithmetic, memory bandwidth, links to other chips, or
latency."""

# Expected shares of the chip's limits.
_DECODE_FLOPS, _PREFILL_FLOPS, _LEARN_FLOPS = 0.5, 0.5, 0.47
_ATTENTION_FLOPS, _SPLASH_FLOPS = 0.15, 0.41
_WEIGHT_BYTES, _CACHE_BYTES, _SLOW_CACHE_BYTES = 0.9, 0.95, 0.72
_FAST_ROWS = 128
"""Rows whose caches are read at the first share of the bandwidth; further rows use the second,
lower one, as in the compiler's estimates."""
_DEQUANTIZE = 5.3
"""Bytes moved per byte of a matrix that is dequantized from 8 or 4 bits before each product."""
_TRUNCATION_BYTES = 200.0
"""Bytes moved per entry of the vocabulary for top-k, top-p or min-p truncation."""
_TOP_K_S = 1.6e-11
"""Seconds per position and entry of the vocabulary of the reference top k on a TPU."""
_GATHERED_SHARE = 0.17
"""Share of the bandwidth at which the rows of single tokens are gathered and multiplied."""
_FLUSHED_PER_S, _SELECTED_PER_S = 125e9, 125e9
"""Bytes a second that a TPU's flush moves to the ring caches, and of int8 caches that it passes
over."""
_REDUCE_S = 25e-6
"""Least seconds of a collective between chips."""
HOST_BYTES_PER_S, _HOST_ROW_S = 8e9, 0.5e-6
"""Bytes a second that a chip copies from host memory, and least seconds for each row: assumed."""
_LAUNCH_S = 1e-3
"""Least seconds of a program and of the host's check for finished slots."""
_PASSES = {"none": 2.0, "dots": 2.1, "full": 3.0, "offload": 3.0}
"""Forward passes of a layer that a gradient costs, by `plan.remat`; weights have no gradient."""
_HEAD_PASSES = 2.0


@dataclass(frozen=True)
class Seconds:
    """An estimated time, its lower bound by the chip's limits, and what takes most of it."""

    low: float
    expected: float
    regime: Regime

    def __add__(self, other: Seconds) -> Seconds:
        """The time of both, one after the other."""
        regime = self.regime if self.expected >= other.expected else other.regime
        return Seconds(self.low + other.low, self.expected + other.expected, regime)

    def longer(self, other: Seconds) -> Seconds:
        """The time of both, at the same time."""
        regime = self.regime if self.expected >= other.expected else other.regime
        return Seconds(max(self.low, other.low), max(self.expected, other.expected), regime)

    def __mul__(self, times: float) -> Seconds:
        """The time of `times` repetitions."""
        return Seconds(self.low * times, self.expected * times, self.regime)


def fixed_time(seconds: float) -> Seconds:
    """A time that does not depend on the model."""
    return Seconds(seconds, seconds, "latency")


@dataclass(frozen=True)
class _Load:
    """Resources that a program uses on each chip."""

    flops: float = 0.0
    attention_flops: float = 0.0
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    rows: int = 0
    link_bytes: float = 0.0
    latency_s: float = 0.0
    attention_share: float = _ATTENTION_FLOPS
    vector_s: float = 0.0  # of work outside of the matrix unit, which the roofline does not count

    def seconds(self, chip: Chip, *, flops_share: float) -> Seconds:
        """The time on a chip; products of integers count as those of bfloat16."""
        link_s = self.link_bytes / chip.link_bytes_per_s
        compute = self.flops / chip.bf16_flops + self.attention_flops / chip.bf16_flops
        memory = (self.weight_bytes + self.cache_bytes) / chip.bytes_per_s
        low = max(compute, memory, link_s)
        slow_compute = self.flops / (flops_share * chip.bf16_flops)
        slow_compute += self.attention_flops / (self.attention_share * chip.bf16_flops)
        slow_compute += self.vector_s
        parts: dict[Regime, float] = {
            "compute": slow_compute,
            "bandwidth": self.weight_bytes / (_WEIGHT_BYTES * chip.bytes_per_s)
            + self._caches_s(chip),
            "links": link_s,
            "latency": self.latency_s,
        }
        # Arithmetic does not overlap with reading caches.
        busy = parts["compute"], parts["bandwidth"]
        total = sum(busy) if self.cache_bytes else max(busy)
        expected = max(low, total + parts["links"] + parts["latency"])
        regime: Regime = max(parts, key=lambda name: parts[name])
        return Seconds(low, expected, regime)

    def _caches_s(self, chip: Chip) -> float:
        """Seconds of reading the caches."""
        full = min(1.0, _FAST_ROWS / max(1, self.rows)) * self.cache_bytes
        further = self.cache_bytes - full
        return (full / _CACHE_BYTES + further / _SLOW_CACHE_BYTES) / chip.bytes_per_s


@lru_cache
def _base_bytes(shape: ModelShape, dtype: str, quantization: str, tp: int) -> float:
    """Bytes read for one product with every matrix of the base.

    Of the per-layer embeddings, only rows are read.
    """
    found: float = shape.base_bytes(dtype, quantization=quantization, tp=tp)
    parts = tp if shape.vocab % tp == 0 else 1
    found -= shape.per_layer_embedding_parameters * DTYPE_BYTES[dtype] // parts
    if quantization in {"int8", "nf4"}:
        found += _DEQUANTIZE * shape.layers_bytes(dtype, tp=tp)
    return found


@lru_cache
def _parameters(shape: ModelShape) -> tuple[int, int]:
    """Parameters that a token is multiplied by, and those without the tied embedding."""
    return shape.body_parameters + shape.embedding_parameters, shape.body_parameters


@dataclass(frozen=True)
class RooflineModel:
    """Times of a configuration's programs on a chip; its sizes are ignored."""

    config: Config
    shape: ModelShape
    chip: Chip

    def decode_step(self, slots: int) -> Seconds:
        """A decode step with `slots` slots on a shard: a chip, or a group of tp chips."""
        plan, shape, tp = self.config.plan, self.shape, self.config.plan.tp_of_sampler
        base = self._base_bytes(of_sampler=True)
        cache = slots * self._kv_bytes_read()
        truncation = (
            _TRUNCATION_BYTES * slots * shape.vocab if self.config.rollout.truncates else 0.0
        )
        merged = plan.rollout_weights == "merged"
        load = _Load(
            flops=2 * slots * (_parameters(shape)[0] + (0 if merged else self._adapter)) / tp,
            attention_flops=0.0,
            weight_bytes=base + truncation / tp,
            cache_bytes=cache,
            rows=slots,
            link_bytes=self._gathered(plan.fsdp_of_sampler, tp)
            + self._reduced(slots, tp)
            + self._per_layer_inputs(slots, plan.devices_per_sampler, tp),
            # An adapted matrix needs two more small products.
            latency_s=shape.layers * self.chip.layer_s * (0.25 if merged else 1.0)
            + self._reductions(tp)
            + self._lookups(slots, plan.devices_per_sampler),
        )
        return load.seconds(self.chip, flops_share=_DECODE_FLOPS)

    def flush(self, slots: int) -> Seconds:
        """The end of a segment: moving new positions to the ring caches, and the host's check."""
        size = slots * self.kv_bytes_per_row()
        new = slots * self.kv_bytes_per_row(recent=self.config.segment_steps) - size
        vector_s = 0.0
        if self.chip.platform == "tpu":
            vector_s = new / _FLUSHED_PER_S
            vector_s += size / _SELECTED_PER_S if self.config.plan.kv_cache == "int8" else 0.0
        # Two blocks of a row, each as long as the segment, are read and written.
        load = _Load(cache_bytes=4 * new, rows=slots, latency_s=_LAUNCH_S, vector_s=vector_s)
        return load.seconds(self.chip, flops_share=_DECODE_FLOPS)

    def segment(self, slots: int) -> Seconds:
        """A decode segment with `slots` slots on a shard, its flush included."""
        return self.decode_step(slots) * self.config.segment_steps + self.flush(slots)

    def prefill(self, positions: int, *, seq: int) -> Seconds:
        """Prefill of `positions` prompt positions on a shard, in prompts of `seq` positions.

        It ends with the last keys and values: layers that share those of others take no time.
        """
        config, shape, tp = self.config, self.shape.prefilled, self.config.plan.tp_of_sampler
        share = shape.layers / self.shape.layers
        adapter = self.shape.adapter_parameters(config.lora, prefilled=True)
        layers = self._gathered(config.plan.fsdp_of_sampler, tp) + self._reduced(positions, tp)
        load = _Load(
            flops=2 * positions * (_parameters(shape)[1] + adapter) / tp,
            attention_flops=positions * replace(self, shape=shape).attention_flops(seq) / tp,
            weight_bytes=_base_bytes(shape, config.model.dtype, config.sampler_quantization, tp),
            link_bytes=share * layers
            + self._per_layer_inputs(positions, config.plan.devices_per_sampler, tp),
            latency_s=_LAUNCH_S + share * self._reductions(tp) + self._copies(positions),
        )
        return load.seconds(self.chip, flops_share=_PREFILL_FLOPS)

    def score(self, positions: int, packing: Packing) -> Seconds:
        """Log-probs, or the reference top k, of `positions` positions of a shard's micro-batch.

        Only learned positions have logits.
        """
        by_vector = self.config.learner.uses_reference_top_k and self.chip.platform == "tpu"
        entries = packing.learned * positions * self.shape.vocab / self.config.plan.tp
        top_k_s = _TOP_K_S * entries if by_vector else 0.0
        return self._learn(positions, packing, passes=1.0, head=packing.learned, vector_s=top_k_s)

    def gradient(self, positions: int, packing: Packing) -> Seconds:
        """The gradient of `positions` positions of a shard's micro-batch; see `score`."""
        passes, learner = _PASSES[self.config.plan.remat], self.config.learner
        # Forward and backward read a row of the embedding for each token of the top k.
        learned = packing.learned
        rows = 2 * learned * positions * learner.kl_top_k if learner.uses_reference_top_k else 0
        size = rows * DTYPE_BYTES[self.config.model.dtype] * self.shape.embed
        gathers_s = size / (_GATHERED_SHARE * self.chip.bytes_per_s)
        head = learned * _HEAD_PASSES
        return self._learn(positions, packing, passes=passes, head=head, vector_s=gathers_s)

    def apply(self) -> Seconds:
        """All-reduce of the adapter's gradient, and one update."""
        size = 4.0 * self._adapter
        links = 2 * size if self.config.plan.learner_devices > 1 else 0.0
        load = _Load(weight_bytes=7 * size, link_bytes=links, latency_s=_LAUNCH_S)
        return load.seconds(self.chip, flops_share=_LEARN_FLOPS)

    def program(self, name: str, packing: Packing) -> Seconds:
        """One run of a prefill, segment, gradient, score or reference_top_k."""
        kind, size = split_name(name)
        if kind == "prefill":
            return self.prefill(self.config.prefill_rows(size) * size, seq=size)
        if kind == "segment":
            return self.segment(size // self.config.plan.sampler_shards)
        positions = size * self.config.row_tokens // self.config.plan.learner_shards
        if kind == "gradient":
            return self.gradient(positions, packing)
        assert kind in {"score", "reference_top_k"}, name
        return self.score(positions, packing)

    def kv_bytes_per_row(self, *, recent: int = 0) -> int:
        """Bytes of a chip's caches for one rollout, with the `recent` positions of a segment."""
        arrays = ProcessArrays.of(self.config, self.shape, "empty")
        rings = arrays.caches(1, self.config.rollout.max_tokens).total()
        return rings + arrays.recent(1, recent)

    def attention_flops(self, seq: float) -> float:
        """Operations of attention scores and values per position of a sequence, over all layers."""
        shape = self.shape
        wide = shape.global_head_dim or shape.head_dim
        seen = shape.local_layers * min(shape.window, seq / 2) * shape.head_dim
        return 4 * shape.heads * (seen + shape.global_layers * wide * seq / 2)

    def _kv_bytes_read(self) -> int:
        """Bytes of caches that a decode step reads for a rollout."""
        arrays = ProcessArrays.of(self.config, self.shape, "empty")
        positions = self.config.rollout.max_tokens, self.config.segment_steps
        return sum(map(arrays.caches_read, positions))

    def _learn(
        self, positions: int, packing: Packing, *, passes: float, head: float, vector_s: float
    ) -> Seconds:
        shape, plan = self.shape, self.config.plan
        body = _parameters(shape)[1]
        # The adapter's own gradient needs one more product.
        adapter = self._adapter * (passes + (1 if passes > 1 else 0))
        flops = 2 * positions * (passes * body + head * shape.embedding_parameters + adapter)
        # The backward pass computes scores for keys, values and queries.
        attention = (
            positions * self.attention_flops(packing.sequence) * (passes + (1 if passes > 1 else 0))
        )
        load = _Load(
            flops=flops / plan.tp,
            attention_flops=attention / plan.tp,
            weight_bytes=passes * self._base_bytes(of_sampler=False),
            link_bytes=passes
            * (self._gathered(plan.fsdp, plan.tp) + self._reduced(positions, plan.tp))
            + self._per_layer_inputs(positions, plan.learner_devices, plan.tp),
            latency_s=_LAUNCH_S + passes * self._reductions(plan.tp) + self._copies(positions),
            vector_s=vector_s,
            attention_share=_SPLASH_FLOPS if plan.uses_splash else _ATTENTION_FLOPS,
        )
        return load.seconds(self.chip, flops_share=_LEARN_FLOPS)

    @property
    def _adapter(self) -> int:
        return self.shape.adapter_parameters(self.config.lora)

    def _base_bytes(self, *, of_sampler: bool) -> float:
        """Bytes that a chip reads for one product with every matrix of the base."""
        plan, shape, dtype = self.config.plan, self.shape, self.config.model.dtype
        kind = self.config.sampler_quantization if of_sampler else self.config.model.quantization
        tp = plan.tp_of_sampler if of_sampler else plan.tp
        return _base_bytes(shape, dtype, kind, tp)

    def _gathered(self, fsdp: int, tp: int) -> float:
        """Bytes of weights that a chip receives from others."""
        return (1 - 1 / fsdp) * _base_bytes(self.shape, self.config.model.dtype, "none", tp)

    def _reduced(self, positions: int, tp: int) -> float:
        """Bytes that a chip exchanges in tensor-parallel reductions."""
        size = DTYPE_BYTES[self.config.model.dtype] * positions * self.shape.embed
        return 4 * self.shape.layers * size * (tp - 1) / tp

    def _per_layer_inputs(self, positions: int, devices: int, tp: int) -> float:
        """Bytes that a chip exchanges to look up the inputs of all layers in sharded embeddings.

        Each device sends a row to every other device of other rows: zeros, except for its tokens.
        """
        if self.config.plan.embeddings_in_host:
            return 0.0
        width = self.shape.layers * self.shape.per_layer_input
        return DTYPE_BYTES[self.config.model.dtype] * positions * width * (devices // tp - 1)

    def _lookups(self, slots: int, devices: int) -> float:
        """Seconds of looking up per-layer embeddings: two collectives, or copies from the host."""
        if self.config.plan.embeddings_in_host:
            return self._copies(slots)
        return 2 * _REDUCE_S if devices > 1 and self.shape.per_layer_input else 0.0

    def _copies(self, positions: int) -> float:
        """Seconds of copying the per-layer embeddings of positions from host memory."""
        if not self.config.plan.embeddings_in_host:
            return 0.0
        row = prod(self.shape.host_row) * DTYPE_BYTES[self.config.model.dtype]
        return positions * max(_HOST_ROW_S, row / HOST_BYTES_PER_S)

    def _reductions(self, tp: int) -> float:
        """Seconds of two reductions in each layer."""
        return 2 * self.shape.layers * _REDUCE_S if tp > 1 else 0.0
