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
from pipeline.plan.programs import SAMPLER, Devices, devices_of, split_name
from pipeline.plan.shapes import DTYPE_BYTES, ModelShape

Parts = dict[str, int]
"""Bytes of a chip by what they are for."""

_FLOAT = _INT = 4
_FIXED = 64 * 2**20
"""Of any program that runs the model: small buffers, and copies that are in flight."""
_KEPT_INPUTS = 3
"""Hidden states of the whole micro-batch that a backward pass has besides each layer's input."""
_WIDE = 4
"""Arrays of a layer's feed-forward width that exist at a time."""
_SCORES = 2
"""Arrays of attention scores, in float32, that exist at a time."""
_GATHERED = 4
"""Layers whose weights are gathered over fsdp ahead of their use."""
_SAVED = 12
"""Of a layer's feed-forward width, what a backward pass without recomputation keeps."""
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

    def weights_in_use(self) -> int:
        """Copies of weights that a program makes to multiply with them.

        The adapter in the base's type; a layer that is gathered, or computed back from its codes.
        """
        layer = self.shape.layer_bytes(self.config.model.dtype, tp=self.place.tp)
        copies = _GATHERED if self.place.fsdp > 1 else int(self.quantization != "none")
        cast = self.adapter * self.number // _FLOAT if self.adapted else 0
        return cast + copies * layer


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
        program: by its name, see `pipeline.plan.programs`.

    Raises:
        ValueError: if there is no such program.
    """
    kind, size = split_name(program)
    return _KINDS[kind](Sizes.of(config, shape, program), size)


def slots_state(sizes: Sizes, slots: int) -> Parts:
    """Of the slots of a sampler and of what was drawn in them; `slots` over all devices."""
    rollout, mine = sizes.config.rollout, slots // sizes.place.shards
    drawn = (3 if rollout.truncates else 2) * _FLOAT * rollout.max_new_tokens
    return {**sizes.rings(mine, rollout.max_tokens), "temporaries": mine * drawn}


def _empty(sizes: Sizes, _: int) -> Parts:
    return slots_state(sizes, sizes.config.rollout_rows)


def _prefill(sizes: Sizes, bucket: int) -> Parts:
    rows = sizes.config.prefill_rows(bucket)
    return {
        **_weights(sizes),
        **sizes.rings(rows, bucket),
        "activations": _forward(sizes, rows, bucket, block=bucket),
        "temporaries": _FIXED + sizes.weights_in_use(),
    }


def _fill(sizes: Sizes, bucket: int) -> Parts:
    state = slots_state(sizes, sizes.config.rollout_rows)
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
    scores = mine * sizes.heads * (config.rollout.max_tokens + steps) * _FLOAT
    return {
        **_weights(sizes),
        **state,
        "activations": _SCORES * scores + mine * _WIDE * sizes.hidden * sizes.number,
        "head": _logits(sizes, mine),
        "temporaries": (state["temporaries"] + _FIXED + recent + settling + sizes.weights_in_use()),
    }


def _score(sizes: Sizes, rows: int) -> Parts:
    mine, seq = rows // sizes.place.shards, sizes.config.row_tokens
    return {
        **_weights(sizes),
        "activations": _forward(sizes, mine, seq, block=min(seq, _BLOCK)),
        "head": _logits(sizes, mine * seq),
        "temporaries": _FIXED + sizes.weights_in_use(),
    }


def _keep(sizes: Sizes, rows: int) -> Parts:
    parts = _score(sizes, rows)
    tokens = rows // sizes.place.shards * sizes.config.row_tokens
    return parts | {"head": parts["head"] + tokens * _top(sizes.config)}


def _gradient(sizes: Sizes, rows: int) -> Parts:
    config, shape = sizes.config, sizes.shape
    mine, seq = rows // sizes.place.shards, config.row_tokens
    tokens = mine * seq
    # A layer works on so many rows at a time, as Parts.of has it.
    most = max(1, config.plan.layer_tokens // seq)
    together = max(size for size in range(1, mine + 1) if mine % size == 0 and size <= most)
    part = _forward(sizes, together, seq, block=min(seq, _BLOCK))
    inputs = {"offload": 1}.get(config.plan.remat, shape.layers)
    kept = (inputs + _KEPT_INPUTS) * shape.embed * sizes.number
    kept += shape.layers * _saved(sizes) * sizes.number
    asked = tokens * _top(config) if config.learner.keeps_top_k else 0
    return {
        **_weights(sizes),
        # What is added to, and what is added.
        "optimizer": 2 * sizes.adapter,
        "activations": tokens * kept + part,
        "head": _logits(sizes, tokens) + asked,
        "temporaries": _FIXED + sizes.weights_in_use() - sizes.adapter * sizes.number // _FLOAT,
    }


def _apply(sizes: Sizes, _: int) -> Parts:
    return {"adapter": sizes.adapter, "optimizer": 3 * sizes.adapter, "temporaries": _FIXED}


_KINDS: dict[str, Callable[[Sizes, int], Parts]] = {
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


def _weights(sizes: Sizes) -> Parts:
    return {"base": sizes.base, "adapter": sizes.adapter if sizes.adapted else 0}


def _forward(sizes: Sizes, rows: int, seq: int, *, block: int) -> int:
    """What a layer makes of so many rows at a time besides what it is given and returns."""
    shape = sizes.shape
    wide = _WIDE * sizes.hidden + 2 * shape.embed + 2 * sizes.heads * shape.head_dim
    scores = rows * sizes.heads * block * seq * _FLOAT
    return rows * seq * wide * sizes.number + _SCORES * scores


def _saved(sizes: Sizes) -> int:
    """Numbers that a layer keeps of a position for the backward pass, besides its input."""
    shape, remat = sizes.shape, sizes.config.plan.remat
    if remat == "none":
        return _SAVED * sizes.hidden
    if remat == "dots":
        attention = sizes.heads * shape.head_dim + 2 * sizes.kv_heads * shape.head_dim
        return attention + 2 * sizes.hidden + 2 * shape.embed
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
