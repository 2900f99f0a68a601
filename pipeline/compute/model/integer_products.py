"""Products of activations and a frozen matrix as products of 8-bit integers.

    y = s_x s_w sum(q_x q_w)    with    q_x = round(x / s_x),   s_x = max |x| / 127

One scale for each position of the activations and one for each output of the matrix. Neither
depends on the summed axes, so both are factors of the integer sum: the vector-wise scheme of
LLM.int8() (arXiv:2208.07339) without its 16-bit outliers.

The rounding of a position depends on that position alone, so a token gives the same result in the
sampler, one at a time, and in the learner, in a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from qwix._src.core import qarray
from qwix._src.core.einsum_info import EinsumInfo

_LARGEST = 127
_SMALLEST_SCALE = 1e-30
"""Avoids a division by zero for a position of zeros, or of values that are flushed to zero."""
_Axes: TypeAlias = tuple[int, ...]


def einsum(equation: str, x: jax.Array, matrix: qarray.QArray) -> jax.Array:
    """`jnp.einsum` of two operands without batch axes; the matrix has one scale per output."""
    info = EinsumInfo.parse(equation)
    (x_axes, axes), batch = info.dimension_numbers
    assert batch == ((), ()), equation
    product = _multiply(x, matrix.qvalue, matrix.scale, (tuple(x_axes), tuple(axes)))
    return product if info.output_perm is None else product.transpose(info.output_perm)


def dot_general(
    x: jax.Array, matrix: qarray.QArray, dimensions: Any, *, out_sharding: None = None
) -> jax.Array:
    """`jax.lax.dot_general` without batch axes; the matrix has one scale per output."""
    (x_axes, axes), (_, batch) = dimensions
    assert not batch, dimensions
    assert out_sharding is None, out_sharding
    return _multiply(x, matrix.qvalue, matrix.scale, (tuple(x_axes), tuple(axes)))


def round_positions(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """8-bit codes, and one float32 scale over `axes`, which are kept with size 1."""
    exact = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(exact), axis=tuple(axes), keepdims=True)
    scale = jnp.maximum(largest / _LARGEST, _SMALLEST_SCALE)
    return jnp.round(exact / scale).astype(jnp.int8), scale


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _multiply(
    x: jax.Array, codes: jax.Array, scale: jax.Array, summed: tuple[_Axes, _Axes]
) -> jax.Array:
    """The product of `x` and the quantized matrix, summed over these axes; in `x`'s dtype.

    Its gradient with respect to `x` is that of the product without rounding of `x`
    (straight-through, arXiv:1308.3432); codes and scale are frozen.
    """
    x_axes, axes = summed
    rounded, x_scale = round_positions(x, x_axes)
    total = jax.lax.dot_general(
        rounded, codes, (summed, ((), ())), preferred_element_type=jnp.int32
    )
    outputs = scale.squeeze(axes)
    positions = x_scale.squeeze(x_axes)
    positions = positions.reshape(positions.shape + (1,) * outputs.ndim)
    return (total.astype(jnp.float32) * positions * outputs.astype(jnp.float32)).astype(x.dtype)


def _forward(
    x: jax.Array, codes: jax.Array, scale: jax.Array, summed: tuple[_Axes, _Axes]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.ShapeDtypeStruct]]:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _multiply(x, codes, scale, summed), (codes, scale, shape)


def _backward(
    summed: tuple[_Axes, _Axes],
    residuals: tuple[jax.Array, jax.Array, jax.ShapeDtypeStruct],
    gradient: jax.Array,
) -> tuple[jax.Array, None, None]:
    codes, scale, shape = residuals
    # Dequantizes only when the gradient is available, see `quantize._dequantized_after`.
    gradient, codes, scale = jax.lax.optimization_barrier((gradient, codes, scale))
    matrix = codes.astype(shape.dtype) * scale.astype(shape.dtype)
    transposed = jax.linear_transpose(
        lambda x: jax.lax.dot_general(x, matrix, (summed, ((), ()))), shape
    )
    (found,) = transposed(gradient)
    return found, None, None


_multiply.defvjp(_forward, _backward)
