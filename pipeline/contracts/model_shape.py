"""Dimensions of a model, from its `config.json`, and the bytes of its arrays. No JAX, no weights.

Counts elements and their bytes without padding; `pipeline.plan.cost_model.memory` estimates the
memory of a device.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from configs.schema import Lora

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by `model.dtype`."""
_BLOCK = 64
"""Quantized weights that share a scale (QLoRA, arXiv:2305.14314)."""
_TARGETS = {
    "attention": r"layers/\d+/attn/\w+",
    "mlp": r"layers/\d+/mlp/\w+",
    "all": r"layers/\d+/(attn|mlp)/\w+",
}


@dataclass(frozen=True)
class Matrix:
    """A matrix that every layer has.

    Attributes:
        path: path of its module in a layer, such as `mlp/gate_proj`.
        shape: its shape.
        lora: elements of its LoRA pair at rank 1.
    """

    path: str
    shape: tuple[int, ...]
    lora: int

    def scale_shape(self, quantization: str) -> tuple[int, ...]:
        """Shape of the scales of the quantized matrix.

        int8_matmul has one scale per output, the others one per block along the summed axis: the
        last but one; for `attn_vec_einsum` all heads together.
        """
        *front, summed, last = self.shape
        if self.path.endswith("attn_vec_einsum"):
            front = [1]
        blocks = summed // scale_block(self.path, self.shape)
        return (*front, 1 if quantization == "int8_matmul" else blocks, last)


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a Gemma 2 or Gemma 3 model.

    Attributes:
        local: for each layer, whether it has sliding-window attention.
        window: positions of the sliding window.
        embed: width of the hidden states.
        hidden: feed-forward width.
        heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        vocab: entries of the tied embedding.
        query_key_norm: whether queries and keys are normalized (Gemma 3).
        attention_softcap: bound of the attention scores; None: unbounded.
        final_softcap: bound of the logits; None: unbounded.
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
        """Number of layers."""
        return len(self.local)

    @property
    def local_layers(self) -> int:
        """Number of layers with sliding-window attention."""
        return sum(self.local)

    @property
    def global_layers(self) -> int:
        """Number of layers with global attention."""
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
        """Parameters of the tied embedding."""
        return self.vocab * self.embed

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices."""
        return sum(prod(matrix.shape) for matrix in self.matrices)

    @property
    def norm_parameters(self) -> int:
        """Parameters of all norms: four per layer (Gemma 3: six), and the final one."""
        per_head = 2 * self.head_dim if self.query_key_norm else 0
        return self.layers * (4 * self.embed + per_head) + self.embed

    @property
    def parameters(self) -> int:
        """Parameters of the frozen base."""
        layers = self.layers * self.layer_parameters
        return self.embedding_parameters + layers + self.norm_parameters

    def adapter_parameters(self, lora: Lora) -> int:
        """Parameters of a fresh adapter, in which some matrices share a lora_a.

        Raises:
            ValueError: if `lora.targets` matches no matrix.
        """
        return lora.rank * _adapted(self, lora.targets)

    def layer_bytes(
        self, dtype: str, *, quantization: str = "none", fsdp: int = 1, tp: int = 1
    ) -> int:
        """Bytes of one layer's matrices on a device; for arguments see `base_bytes`."""
        return sum(
            _bytes(matrix, dtype, quantization=quantization, fsdp=fsdp, tp=tp)
            for matrix in self.matrices
        )

    def base_bytes(
        self, dtype: str, *, quantization: str = "none", fsdp: int = 1, tp: int = 1
    ) -> int:
        """Bytes of the frozen base on a device.

        Args:
            dtype: a `model.dtype`.
            quantization: a `model.quantization`.
            fsdp: number of fully sharded data-parallel shards of the weights.
            tp: number of tensor-parallel shards of heads and widths.
        """
        size = DTYPE_BYTES[dtype]
        layer = self.layer_bytes(dtype, quantization=quantization, fsdp=fsdp, tp=tp)
        embedding = self.embedding_parameters * size // (fsdp * tp)
        return embedding + self.layers * layer + self.norm_parameters * size


def select_targets(paths: Iterable[str], targets: str) -> list[str]:
    """The module paths, such as `layers/0/attn/q_einsum`, that `lora.targets` selects.

    Raises:
        ValueError: if there are none, with the nearest and a few others.
    """
    paths = list(paths)
    pattern = _TARGETS.get(targets, targets)
    found = [path for path in paths if re.fullmatch(pattern, path)]
    if not found:
        nearest = difflib.get_close_matches(pattern.replace("\\d+", "0"), paths, 1, cutoff=0.0)
        raise ValueError(
            f"lora.targets = {targets!r} matches no whole module path; nearest: {nearest[0]}; "
            f"there are {', '.join(paths[:7])} ... {paths[-1]}"
        )
    return found


@lru_cache
def _adapted(shape: ModelShape, targets: str) -> int:
    """Elements of the adapter at rank 1."""
    elements = {
        f"layers/{layer}/{matrix.path}": matrix.lora
        for layer in range(shape.layers)
        for matrix in shape.matrices
    }
    return sum(elements[path] for path in select_targets(elements, targets))


def scale_block(path: str, shape: tuple[int, ...]) -> int:
    """Weights along the summed axis, the last but one, that share a scale when quantized in blocks.

    In `attn_vec_einsum` all heads share a scale.
    """
    *front, summed, _ = shape
    most = max(1, _BLOCK // front[0]) if path.endswith("attn_vec_einsum") else _BLOCK
    return max(size for size in range(1, most + 1) if summed % size == 0)


FSDP, TP = "fsdp", "tp"
"""Axes of the device mesh over which weights are sharded."""
MATRIX_AXES: dict[str, tuple[str | None, ...]] = {
    "attn/q_einsum": (TP, FSDP, None),
    "attn/kv_einsum": (None, TP, FSDP, None),
    "attn/qkv_einsum": (None, TP, FSDP, None),
    "attn/attn_vec_einsum": (TP, None, FSDP),
    "mlp/gate_proj": (FSDP, TP),
    "mlp/up_proj": (FSDP, TP),
    "mlp/down_proj": (TP, FSDP),
}
"""Mesh axes of each axis of a matrix: FSDP for the width of the hidden states, TP for heads, kv
heads and feed-forward width. An axis that they do not divide is replicated."""


def _bytes(matrix: Matrix, dtype: str, *, quantization: str, fsdp: int, tp: int) -> int:
    parts = {FSDP: fsdp, TP: tp, None: 1}

    def elements(shape: tuple[int, ...]) -> int:
        axes = zip(shape, MATRIX_AXES[matrix.path], strict=True)
        return prod(n // parts[axis] if n % parts[axis] == 0 else n for n, axis in axes)

    size = DTYPE_BYTES[dtype]
    if quantization == "none":
        return elements(matrix.shape) * size
    codes = elements(matrix.shape)
    scales = elements(matrix.scale_shape(quantization)) * size
    return (codes // 2 if quantization == "nf4" else codes) + scales
