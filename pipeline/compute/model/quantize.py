"""Quantization of the frozen base to 8 or 4 bits (QLoRA, arXiv:2305.14314) with qwix.

The matrices of the layers are stored as codes with one scale per block of 64 weights; norms and the
tied embedding are not quantized. A quantized parameter is two entries of the base, its name
followed by `.array.qvalue` and `.array.scale`; the model dequantizes them for its products.

"int8_matmul" has one scale per output instead, and multiplies the codes with quantized activations
(`integer_products`); "int8_outputs" is the same base, dequantized like the others.

NF4's 16 values are computed by comparison and selection: a table lookup, as in qwix, is a gather of
every weight, slow on a TPU and slower to compile.

4-bit codes are packed two to a byte: only then do they take half a byte on every kind of device,
and JAX 0.10.2 refuses arrays of 4-bit integers as arguments of ahead-of-time compiled programs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from jax.sharding import Sharding
from qwix._src.core import numerics, qarray
from tunix.models.gemma3 import model as gemma3

from pipeline.compute.model import integer_products
from pipeline.data.models.model_shape import scale_block

_NF4 = "nf4"
_INT8 = jnp.dtype("int8")
_QTYPES = {"int8": _INT8, "nf4": _NF4, "int8_matmul": _INT8, "int8_outputs": _INT8}
_NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Appendix E of the paper."""
_CODES, _SCALE = ".array.qvalue", ".array.scale"

_FOUR_BITS = jnp.dtype("uint4")

Recipe: TypeAlias = qarray.HowToQuantize
"""Blocks and code type of a matrix."""


def rule(module: gemma3.Einsum | nnx.Linear, kind: str, *, quantization: str) -> dict[str, Any]:
    """Arguments of qwix's rule for this module's matrix; empty without quantization.

    A block lies along the summed axes, so that its scale belongs to one output; without a size it
    spans all of them.
    """
    if quantization == "none":
        return {}
    how = {"weight_qtype": _QTYPES[quantization]}
    if quantization in {"int8_matmul", "int8_outputs"}:
        return how
    linear = isinstance(module, nnx.Linear)
    shape = (module.in_features, module.out_features) if linear else module.shape
    return how | {"tile_size": scale_block(kind, shape)}


def recipes(model: nnx.Module) -> dict[str, Recipe]:
    """The recipe of each quantized parameter of a model that qwix has wrapped, by path."""
    found = {}
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            how = getattr(value, "how", None)
            if isinstance(how, qarray.HowToQuantize):
                found[".".join(map(str, (*path, name)))] = how
    return found


def entries(
    name: str, value: jax.Array, recipe: Recipe, *, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
    """Quantizes parameter `name` on the devices; the entries of the base.

    `shapes` has the base's entries with their shardings.

    Blocks until they are computed, so that `value` can be freed before the next one is loaded.
    """
    axes, tiled = tuple(recipe.channelwise_axes), tuple(recipe.tiled_axes.items())
    shardings = (shapes[name + _CODES].sharding, shapes[name + _SCALE].sharding)
    codes, scale = _quantizer(recipe.qtype, axes, tiled, shardings)(value)
    return jax.block_until_ready({name + _CODES: codes, name + _SCALE: scale})


@functools.cache
def _quantizer(
    qtype: Any,
    axes: tuple[int, ...],
    tiled: tuple[tuple[int, int], ...],
    shardings: tuple[Sharding | None, Sharding | None],
) -> Any:
    recipe = Recipe(qtype=qtype, channelwise_axes=axes, tiled_axes=dict(tiled))

    def quantized(value: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The scale is rounded to the base's dtype first, so that the codes are the nearest ones
        # under the rounded scale.
        exact = value.astype(jnp.float32)
        scale, _ = qarray.compute_scale_zero_point(qarray.calibrate(exact, recipe), qtype)
        rounded = scale.astype(value.dtype)
        steps = qarray.call_with_generic_broadcast(jnp.divide, exact, rounded.astype(jnp.float32))
        codes = _nearest_nf4(steps) if qtype == _NF4 else numerics.convert_to(steps, qtype)
        return pack(codes), rounded

    return jax.jit(quantized, out_shardings=shardings)


def parameter(name: str, base: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> jax.Array:
    """Base parameter `name` as a plain array; dequantizes it if it is quantized."""
    if name not in recipes:
        return base[name]
    codes, scale = base[name + _CODES], base[name + _SCALE]
    return _dequantizer(recipes[name].qtype)(codes, scale)


@functools.cache
def _dequantizer(qtype: Any) -> Any:
    dtype = _FOUR_BITS if qtype == _NF4 else qtype

    def dequantized(codes: jax.Array, scale: jax.Array) -> jax.Array:
        return dequantize(qarray.QArray(unpack(codes, dtype), scale, None, qtype))

    return jax.jit(dequantized)


class Provider(qwix.LoraProvider):
    """qwix's LoRA on quantized matrices, which are dequantized for each product.

    Args:
        rules: adapted and quantized modules.
        quantization: with "int8_matmul" codes are multiplied instead; the adapter's products do not
            change.
        flat: whether rows and positions are flattened to one axis for products. The gradient of an
            adapter sums over both: over two axes XLA for the CPU writes each factor transposed,
            element by element, which takes as long as everything else. On a TPU one axis is slower
            and takes more memory.
    """

    def __init__(
        self, rules: Sequence[qwix.QuantizationRule], *, quantization: str, flat: bool
    ) -> None:
        super().__init__(rules)
        self._flat = flat
        integers = quantization == "int8_matmul"
        self._einsum_fn = integer_products.einsum if integers else _einsum
        self._dot_general_fn = integer_products.dot_general if integers else _dot_general

    def dot_general(
        self, lhs: jax.Array, rhs: Any, dimension_numbers: Any, *args: Any, **settings: Any
    ) -> jax.Array:
        """See `qwix.LoraProvider`."""
        (summed, rhs_summed), batch = dimension_numbers
        if not self._flat or lhs.ndim < 3 or min(summed) < 2 or batch != ((), ()):
            return super().dot_general(lhs, rhs, dimension_numbers, *args, **settings)
        numbers = (tuple(axis - 1 for axis in summed), rhs_summed), batch
        product = super().dot_general(_flat(lhs), rhs, numbers, *args, **settings)
        return product.reshape(*lhs.shape[:2], *product.shape[1:])

    def einsum(self, einsum_str: str, *operands: Any, **settings: Any) -> jax.Array:
        """See `qwix.LoraProvider`."""
        terms, out = einsum_str.split("->")
        first, *others = terms.split(",")
        positions = first[:2]
        apart = positions.isalpha() and positions in out and len(first) > 2
        if not self._flat or not apart or set(positions) & set("".join(others)):
            return super().einsum(einsum_str, *operands, **settings)
        at = out.index(positions)
        equation = f"{','.join([first[1:], *others])}->{out.replace(positions, positions[1])}"
        x, *matrices = operands
        product = super().einsum(equation, _flat(x), *matrices, **settings)
        return product.reshape(*product.shape[:at], *x.shape[:2], *product.shape[at + 1 :])


def _flat(x: jax.Array) -> jax.Array:
    """Flattens rows and positions to one axis."""
    return x.reshape(-1, *x.shape[2:])


def _einsum(equation: str, x: jax.Array, matrix: qarray.QArray) -> jax.Array:
    x, plain = _dequantized_after(x, matrix)
    return jnp.einsum(equation, x, plain)


def _dot_general(
    x: jax.Array, matrix: qarray.QArray, dimensions: Any, **settings: Any
) -> jax.Array:
    x, plain = _dequantized_after(x, matrix)
    return jax.lax.dot_general(x, plain, dimensions, **settings)


def _dequantized_after(x: jax.Array, matrix: qarray.QArray) -> tuple[jax.Array, jax.Array]:
    """`x`, and the matrix, dequantized only after `x` is available.

    Without this barrier XLA may dequantize the matrices of all layers at once.
    """
    x, codes, scale = jax.lax.optimization_barrier((x, matrix.qvalue, matrix.scale))
    return x, dequantize(qarray.QArray(codes, scale, None, matrix.qtype))


def dequantize(array: qarray.QArray) -> jax.Array:
    """The dequantized values, in the dtype of the scale."""
    values = _nf4_values(array.qvalue) if array.qtype == _NF4 else array.qvalue
    return qarray.call_with_generic_broadcast(
        jnp.multiply, values.astype(array.scale.dtype), array.scale
    )


def _nearest_nf4(x: jax.Array) -> jax.Array:
    """Index of the nearest NF4 value, the lower one of a tie."""
    code = jnp.zeros(x.shape, jnp.int32)
    for low, high in itertools.pairwise(_NF4_VALUES):
        code += x > (low + high) / 2
    return code.astype(_FOUR_BITS)


def _nf4_values(codes: jax.Array) -> jax.Array:
    """NF4 values by index, selected bit by bit."""
    whole = codes.astype(jnp.int32)
    choices: list[Any] = list(_NF4_VALUES)
    for bit in range(4):
        is_set = (whole >> bit) & 1 == 1
        pairs = zip(choices[::2], choices[1::2], strict=True)
        choices = [jnp.where(is_set, high, low) for low, high in pairs]
    (values,) = choices
    return values


def pack(codes: jax.Array) -> jax.Array:
    """Codes in their stored form: 4-bit codes two to a byte, along the last axis."""
    if codes.dtype != _FOUR_BITS:
        return codes
    pairs = codes.reshape(*codes.shape[:-1], -1, 2).astype(jnp.uint8)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(kept: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `pack` for codes of this dtype."""
    if dtype != _FOUR_BITS:
        return kept
    pairs = jnp.stack([kept & 15, kept >> 4], axis=-1)
    return pairs.reshape(*kept.shape[:-1], -1).astype(dtype)


def packed_shape(codes: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the result of `pack`."""
    if codes.dtype != _FOUR_BITS:
        return codes
    return jax.ShapeDtypeStruct((*codes.shape[:-1], codes.shape[-1] // 2), jnp.uint8)
