"""Dimensions of a model, from its `config.json`, and the bytes of its arrays. No JAX, no weights.

Counts elements and their bytes without padding; `pipeline.plan.cost_model.memory` estimates the
memory of a device.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
    "per_layer": r"layers/\d+/per_layer/\w+",
    "all": r"layers/\d+/(attn|mlp|per_layer)/\w+",
}


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer: path of its module, such as `mlp/gate_proj`, and its shape.

    `lora` is the number of elements of its LoRA pair at rank 1.
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


LOADING_COPIES = 3
"""Further copies of per-layer embeddings for host memory while a process loads them: as they are
read, on the host, and with their padding."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a Gemma 2, 3 or 4 model.

    In a Gemma 4 the last layers may attend to the keys and values of earlier ones, and layers may
    differ in the width of a head and of the feed-forward.

    Attributes:
        local: for each layer, whether it has sliding-window attention.
        window: positions of the sliding window.
        embed: width of the hidden states.
        hidden: feed-forward width.
        heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        vocab: entries of the tied embedding.
        query_key_norm: whether queries and keys are normalized (Gemma 3 and 4).
        attention_softcap: bound of the attention scores; None: unbounded.
        final_softcap: bound of the logits; None: unbounded.
        value_norm: whether values are normalized without a weight, norms multiply by their weight
            instead of 1 plus it, and each layer scales its output (Gemma 4).
        global_head_dim: width of a head in global layers; None: `head_dim`.
        kv_shared_layers: number of last layers without keys and values of their own.
        shared_hidden: feed-forward width of these layers; None: `hidden`.
        per_layer_input: width of the embedding that a token has for each layer; 0: none.
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
    value_norm: bool = False
    global_head_dim: int | None = None
    kv_shared_layers: int = 0
    shared_hidden: int | None = None
    per_layer_input: int = 0

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

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to.

        Itself; for the last `kv_shared_layers`, the last of the other layers of the same kind.
        """
        if self.has_kv(layer):
            return layer
        return max(n for n in self.kv_layers if self.local[n] == self.local[layer])

    @property
    def shared_sources(self) -> set[int]:
        """The layers whose keys and values later ones attend to."""
        return {self.kv_source(n) for n in range(len(self.kv_layers), self.layers)}

    def has_kv(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own."""
        return layer in self.kv_layers

    @property
    def kv_layers(self) -> range:
        """The layers that have keys and values, and so a cache, of their own: the first ones."""
        return range(self.layers - self.kv_shared_layers)

    @property
    def prefilled(self) -> ModelShape:
        """The layers that a prefill computes, which ends with the last keys and values."""
        return replace(self, local=self.local[: len(self.kv_layers)], kv_shared_layers=0)

    def head_dim_of(self, layer: int) -> int:
        """Width of a head of a layer."""
        return self.head_dim if self.local[layer] else self.global_head_dim or self.head_dim

    def hidden_of(self, layer: int) -> int:
        """Feed-forward width of a layer."""
        return self.hidden if self.has_kv(layer) else self.shared_hidden or self.hidden

    def matrices(self, layer: int) -> tuple[Matrix, ...]:
        """The matrices of a layer."""
        d, f, n, k = self.embed, self.hidden_of(layer), self.heads, self.kv_heads
        h, p = self.head_dim_of(layer), self.per_layer_input
        query = Matrix("attn/q_einsum", (n, d, h), d + n * h)
        if not self.has_kv(layer):
            read = [query]
        elif n == k:
            read = [Matrix("attn/qkv_einsum", (3, n, d, h), d + 3 * n * h)]
        else:
            read = [query, Matrix("attn/kv_einsum", (2, k, d, h), d + 2 * k * h)]
        found = [
            *read,
            Matrix("attn/attn_vec_einsum", (n, h, d), n * h + d),
            Matrix("mlp/gate_proj", (d, f), d + f),
            Matrix("mlp/up_proj", (d, f), d + f),
            Matrix("mlp/down_proj", (f, d), f + d),
        ]
        if p:
            found.append(Matrix("per_layer/input_gate", (d, p), d + p))
            found.append(Matrix("per_layer/projection", (p, d), p + d))
        return tuple(found)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the tied embedding."""
        return self.vocab * self.embed

    @property
    def per_layer_embedding_parameters(self) -> int:
        """Parameters of the embeddings that tokens have for each layer."""
        return self.vocab * self.layers * self.per_layer_input

    def check_embeddings(self, place: str) -> None:
        """Raises a ValueError if they are to be in host memory, and the model has none."""
        if place == "host" and not self.per_layer_input:
            raise ValueError(
                'plan.per_layer_embeddings = "host": this model has no per-layer embeddings; '
                'nearest valid: "chips"'
            )

    @property
    def host_row(self) -> tuple[int, int]:
        """Shape of a token's embeddings for all layers in host memory, with padding at the end.

        Whole tiles of 8 x 128 numbers: otherwise a TPU cannot copy a row without its neighbours.
        """
        return 8 * -(-self.layers * self.per_layer_input // (8 * 128)), 128

    @property
    def per_layer_projection_parameters(self) -> int:
        """Parameters of the projection of a token's embedding to the inputs of all layers."""
        return self.embed * self.layers * self.per_layer_input

    def layer_parameters(self, layer: int) -> int:
        """Parameters of a layer's matrices."""
        return sum(prod(matrix.shape) for matrix in self.matrices(layer))

    @property
    def norm_parameters(self) -> int:
        """Parameters of all norms and of the layers' scales.

        Four norms per layer, in Gemma 3 and 4 one of queries and one of keys, with per-layer inputs
        one of them; the final norm, and one of all per-layer inputs.
        """
        found = self.embed + self.per_layer_input
        for layer in range(self.layers):
            per_head = (1 + self.has_kv(layer)) if self.query_key_norm else 0
            found += (4 + (self.per_layer_input > 0)) * self.embed + self.value_norm
            found += per_head * self.head_dim_of(layer)
        return found

    @property
    def body_parameters(self) -> int:
        """Parameters that every token is multiplied by, besides the tied embedding."""
        layers = sum(map(self.layer_parameters, range(self.layers)))
        return layers + self.per_layer_projection_parameters + self.norm_parameters

    @property
    def parameters(self) -> int:
        """Parameters of the frozen base."""
        embeddings = self.embedding_parameters + self.per_layer_embedding_parameters
        return embeddings + self.body_parameters

    def adapter_parameters(self, lora: Lora, *, prefilled: bool = False) -> int:
        """Parameters of a fresh adapter; with `prefilled` of the layers that a prefill computes.

        Raises:
            ValueError: if `lora.targets` matches no matrix.
        """
        layers = len(self.kv_layers) if prefilled else self.layers
        return lora.rank * _adapted(self, lora.targets, layers)

    def layer_bytes(self, layer: int, dtype: str, *, tp: int) -> int:
        """Bytes of a layer's matrices on a device that gathers them from its FSDP group."""
        return sum(
            _bytes(matrix, dtype, quantization="none", fsdp=1, tp=tp)
            for matrix in self.matrices(layer)
        )

    def layers_bytes(
        self, dtype: str, *, quantization: str = "none", fsdp: int = 1, tp: int = 1
    ) -> int:
        """Bytes of the matrices of all layers on a device; for arguments see `base_bytes`."""
        return sum(
            count * _bytes(matrix, dtype, quantization=quantization, fsdp=fsdp, tp=tp)
            for matrix, count in _count_matrices(self).items()
        )

    def host_bytes(self, dtype: str) -> int:
        """Bytes of the per-layer embeddings in host memory, for each device."""
        return self.vocab * prod(self.host_row) * DTYPE_BYTES[dtype]

    def base_bytes(
        self,
        dtype: str,
        *,
        quantization: str = "none",
        fsdp: int = 1,
        tp: int = 1,
        data: int = 1,
        in_host: bool = False,
    ) -> int:
        """Bytes of the frozen base in a device's memory.

        Args:
            dtype: a `model.dtype`.
            quantization: a `model.quantization`.
            fsdp: number of fully sharded data-parallel shards of the weights.
            tp: number of tensor-parallel shards of heads and widths.
            data: number of shards of batch rows only; the per-layer embeddings, which are read a
                row at a time, are sharded over all devices.
            in_host: whether the per-layer embeddings are in host memory.
        """
        size = DTYPE_BYTES[dtype]
        layers = self.layers_bytes(dtype, quantization=quantization, fsdp=fsdp, tp=tp)
        embedding = self.embedding_parameters * size // (fsdp * tp)
        parts = data * fsdp * tp if self.vocab % (data * fsdp * tp) == 0 else 1
        per_layer = 0 if in_host else self.per_layer_embedding_parameters * size // parts
        whole = (self.per_layer_projection_parameters + self.norm_parameters) * size
        return embedding + per_layer + layers + whole


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
def _count_matrices(shape: ModelShape) -> Counter[Matrix]:
    """Number of layers that have each matrix."""
    return Counter(matrix for layer in range(shape.layers) for matrix in shape.matrices(layer))


@lru_cache
def _adapted(shape: ModelShape, targets: str, layers: int) -> int:
    """Elements of the adapter of the first `layers` layers at rank 1."""
    elements = {
        f"layers/{layer}/{matrix.path}": matrix.lora * (layer < layers)
        for layer in range(shape.layers)
        for matrix in shape.matrices(layer)
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
    "per_layer/input_gate": (FSDP, None),
    "per_layer/projection": (None, FSDP),
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
