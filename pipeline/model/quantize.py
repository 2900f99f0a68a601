"""The frozen base in 8 or 4 bits (QLoRA, arXiv:2305.14314), by qwix.

The matrices of the layers are kept as codes and a scale for each block of 64 weights; norms and
the tied embedding stay as they are. A quantized parameter is two entries of the base, its name
followed by `.array.qvalue` and `.array.scale`; the model multiplies with what they stand for.

Codes of 4 bits are kept two to a byte: only so they take half a byte on every kind of device, and
JAX 0.10.2 refuses arrays of 4-bit integers as arguments of programs that are compiled ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from jax.sharding import Sharding
from qwix._src.core import qarray
from tunix.models.gemma3 import model as gemma3

BLOCK = 64
"""Weights that share a scale: as many as in the paper."""
_QTYPES = {"int8": jnp.dtype("int8"), "nf4": "nf4"}
_CODES, _SCALE = ".array.qvalue", ".array.scale"

_FOUR_BITS = jnp.dtype("uint4")

Recipe: TypeAlias = qarray.HowToQuantize
"""How a matrix is cut into blocks, and what its codes are."""


def rule(module: gemma3.Einsum | nnx.Linear, kind: str, *, quantization: str) -> dict[str, Any]:
    """How qwix keeps this module's matrix: arguments of its rule; empty without quantization.

    A block lies along the axes that are summed over, so that what it scales is one output.
    """
    if quantization == "none":
        return {}
    if kind == "attn_vec_einsum":
        heads, summed, _ = module.shape
        most = max(1, BLOCK // heads)  # qwix lets all heads share a scale
    else:
        summed = module.shape[-2] if isinstance(module, gemma3.Einsum) else module.in_features
        most = BLOCK
    tile = max(size for size in range(1, most + 1) if summed % size == 0)
    return {"weight_qtype": _QTYPES[quantization], "tile_size": tile}


def recipes(model: nnx.Module) -> dict[str, Recipe]:
    """How each quantized parameter of a model that qwix has wrapped is made, by path."""
    found = {}
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            how = getattr(value, "how", None)
            if isinstance(how, Recipe):
                found[".".join(map(str, (*path, name)))] = how
    return found


def entries(name: str, value: jax.Array, recipe: Recipe, *, sharding: Sharding) -> dict[str, Any]:
    """The entries of the base for parameter `name`, quantized on the devices of `sharding`.

    Returns when they are there, so that `value` can be freed before the next one is loaded.
    """
    axes, tiled = tuple(recipe.channelwise_axes), tuple(recipe.tiled_axes.items())
    codes, scale = _quantizer(recipe.qtype, axes, tiled, sharding)(value)
    return jax.block_until_ready({name + _CODES: codes, name + _SCALE: scale})


@functools.cache
def _quantizer(
    qtype: Any, axes: tuple[int, ...], tiled: tuple[tuple[int, int], ...], sharding: Sharding
) -> Any:
    recipe = Recipe(qtype=qtype, channelwise_axes=axes, tiled_axes=dict(tiled))

    def quantized(value: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The scale is rounded to the base's type before the codes are chosen, which are then the
        # nearest ones under the scale that is used.
        exact = value.astype(jnp.float32)
        scale, _ = qarray.compute_scale_zero_point(qarray.calibrate(exact, recipe), qtype)
        kept = scale.astype(value.dtype)
        rounded = kept.astype(jnp.float32)
        codes = qarray.quantize_with_scale_zero_point(exact, qtype, rounded, None).qvalue
        return pack(codes), kept

    return jax.jit(quantized, out_shardings=sharding)


def parameter(name: str, base: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> jax.Array:
    """Base parameter `name` as an array of its own shape, whatever form it is kept in."""
    if name not in recipes:
        return base[name]
    codes, scale = base[name + _CODES], base[name + _SCALE]
    return _dequantizer(recipes[name].qtype)(codes, scale)


@functools.cache
def _dequantizer(qtype: Any) -> Any:
    dtype = _FOUR_BITS if qtype == "nf4" else qtype

    def dequantized(codes: jax.Array, scale: jax.Array) -> jax.Array:
        return qwix.dequantize(qarray.QArray(unpack(codes, dtype), scale, None, qtype))

    return jax.jit(dequantized)


def pack(codes: jax.Array) -> jax.Array:
    """Codes as they are kept: of 4 bits two to a byte, along the last axis."""
    if codes.dtype != _FOUR_BITS:
        return codes
    pairs = codes.reshape(*codes.shape[:-1], -1, 2).astype(jnp.uint8)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(kept: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `pack` was given, if that was of type `dtype`."""
    if dtype != _FOUR_BITS:
        return kept
    pairs = jnp.stack([kept & 15, kept >> 4], axis=-1)
    return pairs.reshape(*kept.shape[:-1], -1).astype(dtype)


def kept_shape(codes: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Shape and type of what `pack` makes."""
    if codes.dtype != _FOUR_BITS:
        return codes
    return jax.ShapeDtypeStruct((*codes.shape[:-1], codes.shape[-1] // 2), jnp.uint8)
