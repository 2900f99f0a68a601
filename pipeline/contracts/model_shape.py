"""The sizes of a model as the planner counts them, from its `config.json`. No JAX, no weights.

Counts elements and the bytes that they take where nothing is padded; what a device adds to that is
the business of `pipeline.plan.cost_model.memory`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from configs.schema import Lora

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Of a number, by `model.dtype`."""
_BLOCK = 64  # weights that share a scale, as pipeline.compute.model.quantize has it
_TARGETS = {
    "attention": r"layers/\d+/attn/\w+",
    "mlp": r"layers/\d+/mlp/\w+",
    "all": r"layers/\d+/(attn|mlp)/\w+",
}


@dataclass(frozen=True)
class Matrix:
    """A kind of matrix that each layer has one of.

    Attributes:
        path: of its module in a layer, such as `mlp/gate_proj`.
        shape: as it is kept.
        lora: elements of its LoRA pair at rank 1.
    """

    path: str
    shape: tuple[int, ...]
    lora: int

    def scale_shape(self, quantization: str) -> tuple[int, ...]:
        """Of the scales where the matrix is kept in codes.

        int8_matmul has one for each output, the others one for each block along what is summed
        over: the last but one axis, of `attn_vec_einsum` all heads together.
        """
        *front, summed, last = self.shape
        most = _BLOCK
        if self.path.endswith("attn_vec_einsum"):
            most = max(1, _BLOCK // front[0])
            front = [1]
        block = max(size for size in range(1, most + 1) if summed % size == 0)
        blocks = 1 if quantization == "int8_matmul" else summed // block
        return (*front, blocks, last)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Gemma 2 or 3.

    Attributes:
        local: for each layer, whether it sees a window only.
        window: positions that a local layer sees.
        embed: width of the hidden states.
        hidden: width of the feed-forward part.
        heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        vocab: entries of the tied embedding.
        query_key_norm: whether queries and keys are normalised: Gemma 3.
        attention_softcap: bound of the attention scores; None: they have none.
        final_softcap: bound of the logits; None: they have none.
    """

    local: tuple[bool, ...]
    window: int
    embed: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    query_key_norm: bool
    attention_softcap: float | None
    final_softcap: float | None

    @property
    def layers(self) -> int:
        """All of them."""
        return len(self.local)

    @property
    def local_layers(self) -> int:
        """Those that see a window only."""
        return sum(self.local)

    @property
    def global_layers(self) -> int:
        """Those that see everything."""
        return self.layers - self.local_layers

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices of one layer."""
        d, f, n, k, h = self.embed, self.hidden, self.heads, self.kv_heads, self.head_dim
        if n == k:
            read = [Matrix("attn/qkv_einsum", (3, n, d, h), d + 3 * n * h)]
        else:
            read = [
                Matrix("attn/q_einsum", (n, d, h), d + n * h),
                Matrix("attn/kv_einsum", (2, k, d, h), d + 2 * k * h),
            ]
        return (
            *read,
            Matrix("attn/attn_vec_einsum", (n, h, d), n * h + d),
            Matrix("mlp/gate_proj", (d, f), d + f),
            Matrix("mlp/up_proj", (d, f), d + f),
            Matrix("mlp/down_proj", (f, d), f + d),
        )

    @property
    def embedding_parameters(self) -> int:
        """Of the tied embedding."""
        return self.vocab * self.embed

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer."""
        return sum(prod(matrix.shape) for matrix in self.matrices)

    @property
    def norm_parameters(self) -> int:
        """Of all norms: four a layer, in Gemma 3 one of queries and one of keys, and the last."""
        per_head = 2 * self.head_dim if self.query_key_norm else 0
        return self.layers * (4 * self.embed + per_head) + self.embed

    @property
    def parameters(self) -> int:
        """Of the frozen base."""
        layers = self.layers * self.layer_parameters
        return self.embedding_parameters + layers + self.norm_parameters

    def adapter_parameters(self, lora: Lora) -> int:
        """Of the adapter, matrices that share a lora_a counted as a fresh adapter has them.

        Raises:
            ValueError: if `lora.targets` matches no matrix.
        """
        return lora.rank * _adapted(self, lora.targets)

    def layer_bytes(
        self, dtype: str, *, quantization: str = "none", fsdp: int = 1, tp: int = 1
    ) -> int:
        """Of the matrices of one layer on a device; arguments as those of `base_bytes`."""
        return sum(
            _bytes(matrix, dtype, quantization=quantization, fsdp=fsdp, tp=tp)
            for matrix in self.matrices
        )

    def base_bytes(
        self, dtype: str, *, quantization: str = "none", fsdp: int = 1, tp: int = 1
    ) -> int:
        """Of the frozen base on a device.

        Args:
            dtype: a `model.dtype`.
            quantization: a `model.quantization`.
            fsdp: parts of the weights that are gathered layer by layer.
            tp: parts of heads and widths that are computed apart.
        """
        size = DTYPE_BYTES[dtype]
        layer = self.layer_bytes(dtype, quantization=quantization, fsdp=fsdp, tp=tp)
        embedding = self.embedding_parameters * size // (fsdp * tp)
        return embedding + self.layers * layer + self.norm_parameters * size


@dataclass(frozen=True)
class ModelConfig:
    """All settings of a Gemma 2 or 3: its sizes, and settings that do not affect memory.

    Attributes:
        shape: sizes.
        query_scale: queries are multiplied by this before attention.
        global_rope_theta: RoPE base frequency of global layers.
        global_rope_factor: linear RoPE scaling of global layers; 1: none.
        local_rope_theta: RoPE base frequency of local layers.
        local_rope_factor: linear RoPE scaling of local layers; 1: none.
    """

    shape: ModelShape
    query_scale: float
    global_rope_theta: float
    global_rope_factor: float
    local_rope_theta: float
    local_rope_factor: float


@lru_cache
def _adapted(shape: ModelShape, targets: str) -> int:
    """Elements of the adapter at rank 1."""
    pattern = _TARGETS.get(targets, targets)
    found = sum(
        matrix.lora
        for layer in range(shape.layers)
        for matrix in shape.matrices
        if re.fullmatch(pattern, f"layers/{layer}/{matrix.path}")
    )
    if not found:
        paths = ", ".join(f"layers/0/{matrix.path}" for matrix in shape.matrices)
        raise ValueError(
            f"lora.targets = {targets!r} matches no whole module path; there are {paths}, "
            "and so in each layer"
        )
    return found


_FSDP, _TP = "fsdp", "tp"
_AXES: dict[str, tuple[str | None, ...]] = {
    "attn/q_einsum": (_TP, _FSDP, None),
    "attn/kv_einsum": (None, _TP, _FSDP, None),
    "attn/qkv_einsum": (None, _TP, _FSDP, None),
    "attn/attn_vec_einsum": (_TP, None, _FSDP),
    "mlp/gate_proj": (_FSDP, _TP),
    "mlp/up_proj": (_FSDP, _TP),
    "mlp/down_proj": (_TP, _FSDP),
}
"""As `compute.model.sharding` places them: an axis that its parts do not divide stays whole."""


def _bytes(matrix: Matrix, dtype: str, *, quantization: str, fsdp: int, tp: int) -> int:
    parts = {_FSDP: fsdp, _TP: tp, None: 1}

    def elements(shape: tuple[int, ...]) -> int:
        axes = zip(shape, _AXES[matrix.path], strict=True)
        return prod(n // parts[axis] if n % parts[axis] == 0 else n for n, axis in axes)

    size = DTYPE_BYTES[dtype]
    if quantization == "none":
        return elements(matrix.shape) * size
    codes = elements(matrix.shape)
    scales = elements(matrix.scale_shape(quantization)) * size
    return (codes // 2 if quantization == "nf4" else codes) + scales
