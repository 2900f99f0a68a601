"""What a compiled program holds of a chip, estimated from sizes alone: the analytic model. No JAX.

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

Parts = dict[str, int]
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
class Sizes:
    """What all of a process's programs are made of.

    Attributes:
        config: the run; all its sizes are set.
        shape: its model.
        place: the devices of the process.
        quantization: how the base is kept that its programs multiply with.
        adapted: whether they take an adapter; no: it is in the base.
    """

    config: Config
    shape: ModelShape
    place: Devices
    quantization: str
    adapted: bool

    @staticmethod
    def of(config: Config, shape: ModelShape, program: str) -> Sizes:
        """Of the process that runs a program."""
        place = devices_of(config, program)
        if split_name(program)[0] not in SAMPLER:
            return Sizes(config, shape, place, config.model.quantization, adapted=True)
        merged = config.plan.rollout_weights == "merged"
        quantization = "none" if merged else config.sampler_quantization
        return Sizes(config, shape, place, quantization, adapted=not merged)

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
        place = self.place
        return self.shape.base_bytes(
            self.config.model.dtype,
            quantization=self.quantization,
            fsdp=place.fsdp,
            tp=place.tp,
        )

    @property
    def hidden(self) -> int:
        """Feed-forward width that a device computes."""
        return self.shape.hidden // _divides(self.place.tp, self.shape.hidden)

    @property
    def heads(self) -> int:
        """Query heads that a device computes."""
        return self.shape.heads // _divides(self.place.tp, self.shape.heads)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values that a device keeps."""
        return self.shape.kv_heads // _divides(self.place.tp, self.shape.kv_heads)

    def ring(self, positions: int) -> int:
        """Bytes of keys and values of so many positions in one layer."""
        per_head = 2 * self.shape.head_dim * self.number
        if self.config.plan.kv_cache == "int8":
            per_head = 2 * (self.shape.head_dim + _FLOAT)  # a byte each, and a scale
        return positions * self.kv_heads * per_head

    def rings(self, rows: int, positions: int) -> Parts:
        """Of caches of so many rows of at most so many positions."""
        shape = self.shape
        near = min(shape.window, positions)
        return {
            "kv_local": rows * shape.local_layers * self.ring(near),
            "kv_global": rows * shape.global_layers * self.ring(positions),
        }

    @property
    def layer(self) -> int:
        """Bytes of a layer's matrices as they are multiplied: whole along fsdp, not in codes."""
        return self.shape.layer_bytes(self.config.model.dtype, tp=self.place.tp)


def _divides(parts: int, size: int) -> int:
    """Parts that an axis is split into: it stays whole where they do not divide it."""
    return parts if size % parts == 0 else 1


def held(config: Config, shape: ModelShape, program: str) -> Parts:
    """Bytes of each chip that a program holds while it runs, arguments and results included.

    The parts are `base`, `adapter`, `optimizer`, `kv_local`, `kv_global`, `activations`, `head` and
    `temporaries`; those that a program has nothing of are left out.

    Args:
        config: the run; all its sizes are set.
        shape: its model.
        program: by its name, see `pipeline.plan.cost_model.programs`.

    Raises:
        ValueError: if there is no such program.
    """
    kind, size = split_name(program)
    sizes = Sizes.of(config, shape, program)
    parts = _KINDS[kind](sizes, size)
    if "base" in parts:
        ready = _made_ready(sizes, kind, size, sum(parts.values()))
        parts["temporaries"] = parts.get("temporaries", 0) + ready
    return parts


def _made_ready(sizes: Sizes, kind: str, size: int, others: int) -> int:
    """Weights as they are multiplied, where they are kept otherwise.

    A matrix is computed back from its codes when it is needed. Layers are gathered over fsdp ahead
    of their use, many of them as long as a chip has room beside the program's `others`.
    """
    if sizes.place.fsdp == 1:
        return sizes.layer if sizes.quantization != "none" else 0
    share = _GATHERED_BY_SEGMENTS if kind == "segment" else _GATHERED
    if kind in {"gradient", "sft_gradient"} and _rows_together(sizes, size) < _rows_here(
        sizes, size
    ):
        share = _GATHERED_AROUND_LOOPS
    room = (int(HBM_GIB * GIB) - others) // sizes.layer
    return sizes.layer * max(_LEAST_GATHERED, min(int(share * sizes.shape.layers), room))


def slots_state(sizes: Sizes, slots: int) -> Parts:
    """Of the slots of a sampler and of what was drawn in them; `slots` over all devices."""
    rollout, mine = sizes.config.rollout, slots // sizes.place.shards
    drawn = (3 if rollout.truncates else 2) * _FLOAT * rollout.max_new_tokens
    return {**sizes.rings(mine, rollout.max_tokens), "temporaries": mine * drawn}


def _empty(sizes: Sizes, _: int) -> Parts:
    return slots_state(sizes, sizes.config.slots)


def _prefill(sizes: Sizes, bucket: int) -> Parts:
    rows = sizes.config.prefill_rows(bucket)
    return {
        **_weights(sizes),
        **sizes.rings(rows, bucket),
        "activations": _forward(sizes, rows, bucket, block=bucket),
    }


def _fill(sizes: Sizes, bucket: int) -> Parts:
    state = slots_state(sizes, sizes.config.slots)
    prompts = sizes.rings(sizes.config.prefill_rows(bucket), bucket)
    return {name: size + prompts.get(name, 0) for name, size in state.items()}


def _segment(sizes: Sizes, slots: int) -> Parts:
    config, shape, mine = sizes.config, sizes.shape, slots // sizes.place.shards
    state, steps = slots_state(sizes, slots), config.segment_steps
    recent = mine * shape.layers * sizes.ring(steps)
    # While a layer's ring takes up what is recent there is a copy of it.
    longest = config.rollout.max_tokens
    if not shape.global_layers:
        longest = min(shape.window, longest)
    settling = mine * sizes.ring(longest)
    # The adapter in the base's type, and weights that are laid out anew.
    around = int(_LOOP_LAYERS * sizes.layer)
    around += sizes.adapter * sizes.number // _FLOAT if sizes.adapted else 0
    scores = mine * sizes.heads * (config.rollout.max_tokens + steps) * _FLOAT
    return {
        **_weights(sizes),
        **state,
        "activations": _SCORES * scores + mine * _WIDE * sizes.hidden * sizes.number,
        "head": _logits(sizes, mine),
        "temporaries": state["temporaries"] + recent + settling + around,
    }


def _score(sizes: Sizes, rows: int) -> Parts:
    mine, seq = _rows_here(sizes, rows), sizes.config.row_tokens
    return {
        **_weights(sizes),
        "activations": _forward(sizes, mine, seq, block=min(seq, _BLOCK)),
    }


def _reference_top_k(sizes: Sizes, rows: int) -> Parts:
    parts = _score(sizes, rows)
    tokens = _rows_here(sizes, rows) * sizes.config.row_tokens
    return parts | {"head": tokens * _top(sizes.config)}


def _gradient(sizes: Sizes, rows: int) -> Parts:
    config, shape = sizes.config, sizes.shape
    seq = config.row_tokens
    tokens = _rows_here(sizes, rows) * seq
    together = _rows_together(sizes, rows)
    part = _forward(sizes, together, seq, block=min(seq, _BLOCK))
    inputs = {"offload": 1}.get(config.plan.remat, shape.layers)
    kept = (inputs + _KEPT_INPUTS) * shape.embed * sizes.number
    in_parts = together < _rows_here(sizes, rows)
    kept += shape.layers * _saved(sizes, in_parts=in_parts) * sizes.number
    asked = tokens * _top(config) if config.learner.uses_reference_top_k else 0
    return {
        **_weights(sizes),
        # What is added to, and what is added.
        "optimizer": 2 * sizes.adapter,
        "activations": tokens * kept + part,
        "head": _logits(sizes, tokens) + asked,
        "temporaries": _SMALL,
    }


def _apply(sizes: Sizes, _: int) -> Parts:
    return {"adapter": sizes.adapter, "optimizer": 3 * sizes.adapter}


_KINDS: dict[str, Callable[[Sizes, int], Parts]] = {
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


def _weights(sizes: Sizes) -> Parts:
    return {"base": sizes.base, "adapter": sizes.adapter if sizes.adapted else 0}


def _forward(sizes: Sizes, rows: int, seq: int, *, block: int) -> int:
    """What a layer makes of so many rows at a time besides what it is given and returns."""
    shape = sizes.shape
    wide = _WIDE * sizes.hidden + 2 * shape.embed + 2 * sizes.heads * shape.head_dim
    scores = rows * sizes.heads * block * seq * _FLOAT
    return max(0, rows * seq * wide * sizes.number + _SCORES * scores - _FAST)


def _rows_here(sizes: Sizes, rows: int) -> int:
    """Rows of a device."""
    return rows // sizes.place.shards


def _rows_together(sizes: Sizes, rows: int) -> int:
    """Rows that a layer works on at a time in the gradient, as Parts.of has it."""
    here = _rows_here(sizes, rows)
    most = max(1, sizes.config.plan.layer_tokens // sizes.config.row_tokens)
    return max(size for size in range(1, here + 1) if here % size == 0 and size <= most)


def _saved(sizes: Sizes, *, in_parts: bool) -> int:
    """Numbers that a layer keeps of a position for the backward pass, besides its input."""
    shape, remat = sizes.shape, sizes.config.plan.remat
    if remat == "none":
        return int((_SAVED_BY_LOOPS if in_parts else _SAVED) * sizes.hidden)
    if remat == "dots":
        attention = sizes.heads * shape.head_dim + 2 * sizes.kv_heads * shape.head_dim
        # The product with a matrix, and the one with its adapter, which is added to it.
        return 2 * (attention + 2 * sizes.hidden + 2 * shape.embed)
    return 0


def _logits(sizes: Sizes, tokens: int) -> int:
    """Of a block of positions and vocabulary, in float32."""
    plan, place = sizes.config.plan, sizes.place
    vocab = min(plan.head_vocab, sizes.shape.vocab // (place.fsdp * place.tp))
    return min(plan.head_tokens, tokens) * vocab * _FLOAT


def _top(config: Config) -> int:
    """Bytes of what is kept of the likeliest tokens of a position."""
    number = DTYPE_BYTES[config.learner.top_k_dtype]
    return config.learner.kl_top_k * (number + _INT) + _FLOAT
