"""Decode attention of one layer of gemma3-1b on a v5e chip: ours beside Pallas kernels of JAX.

By the TPU compiler, without a TPU. docs/benchmarks.md says why none of the kernels is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as kernel
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.paged_attention.quantization_utils import QuantizedTensor
from jaxtyping import Array, Bool

from launch.bench.v5e import traced_figures
from pipeline.compute.aot.compile import v5e_devices
from pipeline.compute.decode import cache
from pipeline.compute.decode.cache import RingCache, TokenAttention, _scores, _weighted
from pipeline.compute.model.attention import MASKED, Bounds, Queries
from pipeline.compute.model.sharding import make_mesh, replicated

HEADS, HEAD_DIM, WINDOW, STEPS = 4, 256, 512, 32
"""Query heads of the one kv head, and positions of a ring and of the recent ring."""
_TILE, _PAGE = 8, 128


def by_layer(*, slots: int, kv_cache: str, kernel: str) -> dict[str, Any]:
    """Returns microseconds of the attention to a ring and to the recent positions.

    Args:
        slots: of the chip.
        kv_cache: "model" or "int8".
        kernel: "ours", "flash" or "paged".
    """
    place = replicated(make_mesh(v5e_devices(1)))

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def ring(size: int) -> Any:
        shape = slots, 1, size
        if kv_cache == "int8":
            codes, scales = (
                array(*shape, HEAD_DIM, dtype=jnp.int8),
                array(*shape, dtype=jnp.float32),
            )
            return codes, codes, scales, scales
        return (array(*shape, HEAD_DIM, dtype=jnp.bfloat16),) * 2

    def decode_attention(
        query: Queries, new: Array, start: Array, step: Array, ring: RingCache, recent: RingCache
    ) -> Any:
        attend = TokenAttention(start, start + step, step)
        bounds = Bounds(WINDOW, None)
        return attend(query, new, new, bounds=bounds, cache=(ring, recent))

    query = array(slots, 1, HEADS, HEAD_DIM, dtype=jnp.bfloat16)
    new = array(slots, 1, 1, HEAD_DIM, dtype=jnp.bfloat16)
    program = jax.jit(decode_attention, compiler_options={"xla_tpu_scoped_vmem_limit_kib": "32768"})
    attend = {"ours": cache._attend, "flash": _flash, "paged": _paged}[kernel]  # noqa: SLF001
    with mock.patch.object(cache, "_attend", attend):
        traced = program.trace(query, new, array(slots), array(), ring(WINDOW), ring(STEPS))
    found = traced_figures(traced)
    return {"us": 1e3 * found["ms"], "gib": found["gib"], "compile_s": found["compile_s"]}


def _flash(
    query: Queries,
    *,
    cache: tuple[RingCache, RingCache],
    visible: Sequence[Bool[Array, "batch _"]],
    softcap: float | None,
) -> Queries:
    """`cache._attend` whose part of the ring is the flash attention kernel.

    The heads of a slot are queries of one head, padded to a tile, and segments are the mask. The
    sums of the weights, which merge both parts, are in no public result of the kernel.
    """
    assert softcap is None
    (keys, values), recent = cache
    slots, size = visible[0].shape
    heads = query.reshape(slots, 1, HEADS, HEAD_DIM)
    padded = jnp.pad(heads, ((0, 0), (0, 0), (0, _TILE - HEADS), (0, 0)))
    ids = kernel.SegmentIds(jnp.ones((slots, _TILE), jnp.int32), visible[0].astype(jnp.int32))
    sizes = kernel.BlockSizes(block_q=_TILE, block_k_major=size, block_k=size, block_b=_TILE)
    results = kernel._flash_attention(  # noqa: SLF001
        padded, keys, values, None, ids, True, False, 1.0, sizes, False
    )
    of_ring, total, highest = (x[:, :, :HEADS].astype(jnp.float32) for x in results)
    scores = jnp.where(visible[1][:, None, None], _scores(heads, recent), MASKED)
    top = jnp.maximum(highest, scores.max(axis=-1))[..., None]
    share, weights = total[..., None] * jnp.exp(highest[..., None] - top), jnp.exp(scores - top)
    encoded = share * of_ring + _weighted(weights, recent, query.dtype)
    encoded /= share + weights.sum(axis=-1, keepdims=True)
    return encoded.astype(query.dtype).reshape(query.shape)


def _paged(
    query: Queries,
    *,
    cache: tuple[RingCache, RingCache],
    visible: Sequence[Bool[Array, "batch _"]],
    softcap: float | None,
) -> Queries:
    """Paged attention to the first slots of the ring alone: its mask is a length.

    It gives no sum of the weights, so that the recent positions cannot be merged.
    """
    assert softcap is None
    ring, slots = cache[0], len(query)
    pages = [x.reshape(1, -1, _PAGE, x.size // (slots * WINDOW)) for x in ring]
    keys, values = pages[:2] if len(ring) == 2 else map(QuantizedTensor, pages[:2], pages[2:])
    table = jnp.arange(slots * WINDOW // _PAGE, dtype=jnp.int32).reshape(slots, -1)
    lengths = visible[0].sum(axis=-1, dtype=jnp.int32)
    encoded = paged_attention(
        query[:, 0], keys, values, lengths, table, pages_per_compute_block=WINDOW // _PAGE
    )
    return encoded[:, None]
