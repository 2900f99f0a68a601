"""Attention: the interface `Attend`, and attention over whole and packed sequences.

Decoding attends over ring caches instead (see decode/cache.py). Scores may be soft-capped as in
Gemma 2 (arXiv:2408.00118): cap * tanh(score / cap), before the mask. Packed rows are computed by
XLA, or on TPUs by JAX's Pallas kernel (splash attention).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from pipeline.compute.model.sharding import BATCH_AXES, TP

Queries = Float[Array, "batch seq heads head_dim"]
Keys = Float[Array, "batch seq kv_heads head_dim"]
"""Keys or values; each kv head serves heads / kv_heads adjacent query heads."""
LayerCache = Any
"""An `Attend`'s cache of one layer, opaque to the model."""

MASKED = -1e30
"""Score of a masked position; finite, so that no gradient becomes NaN."""
_KERNEL_BLOCKS = (512, 256, 128)
"""Block sizes of the kernel: the largest that divides the row; the hardware's is 128."""


class Bounds(NamedTuple):
    """Bounds of a layer's attention.

    Attributes:
        window: positions that a query attends to, itself included; None: all.
        softcap: bound of the scores; None: no soft cap.
        shared: whether keys and values are those of an earlier layer.
    """

    window: int | None
    softcap: float | None
    shared: bool = False


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer, with a cache.

    Queries are already scaled. Returns the encoded values and the layer's new cache. A layer with
    shared keys and values has no cache: it gets a pair, the cache that the earlier layer got and
    the one that was returned for it, and what is returned for it is ignored.
    """

    def __call__(
        self, query: Queries, key: Keys, value: Keys, *, bounds: Bounds, cache: LayerCache
    ) -> tuple[Queries, LayerCache]:
        """Attends and updates the cache; see the class."""


def soft_cap(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """`x` bounded smoothly to [-cap, cap]; unchanged for None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attend_where(
    query: Queries,
    key: Float[Array, "batch slots kv_heads head_dim"],
    value: Float[Array, "batch slots kv_heads head_dim"],
    *,
    visible: Bool[Array, "#batch #seq slots"],
    softcap: float | None,
) -> Queries:
    """softmax(capped scores of the visible keys) x values, the softmax in float32."""
    if softcap is None:
        mask = jnp.broadcast_to(visible, (query.shape[0], query.shape[1], key.shape[1]))[:, None]
        return jax.nn.dot_product_attention(query, key, value, scale=1.0, mask=mask)
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], soft_cap(scores, softcap), MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)


def attend_causally(
    query: Queries, key: Keys, value: Keys, *, bounds: Bounds, cache: LayerCache
) -> tuple[Queries, LayerCache]:
    """Causal attention; returns `cache` unchanged.

    Rows are left-aligned, so the padding at the end of a row is invisible to its real positions.
    """
    window, softcap = bounds.window, bounds.softcap
    if softcap is not None:
        causal = _causal(query.shape[1], window=window)[None]
        return attend_where(query, key, value, visible=causal, softcap=softcap), cache
    reach = None if window is None or window >= query.shape[1] else (window - 1, 0)
    encoded = jax.nn.dot_product_attention(
        query, key, value, scale=1.0, is_causal=True, local_window_size=reach
    )
    return encoded, cache


@dataclass(frozen=True)
class FlashAttention:
    """The kernel on a mesh: rows sharded over its batch axes, heads over tp if it divides them.

    FlashAttention (arXiv:2205.14135) with segments and a static causal or windowed mask, whose
    empty blocks are skipped. The compiler's cost model does not include the kernel.

    Attributes:
        mesh: TPU devices.
        interpret: interpret the kernel without a TPU, which is slow.
    """

    mesh: Mesh
    interpret: bool = False

    def __call__(
        self, query: Queries, key: Keys, value: Keys, *, bounds: Bounds, layout: Layout
    ) -> Queries:
        """Encoded values; the mask is that of `PackedAttention`."""
        seq = query.shape[1]
        behind = -seq % _KERNEL_BLOCKS[-1]
        query, key, value = (
            jnp.pad(x, ((0, 0), (0, behind), (0, 0), (0, 0))).swapaxes(1, 2)
            for x in (query, key, value)
        )
        layout = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, behind))), layout)
        local = self._by_segment if layout.prefixes is None else self._by_row
        rows, heads = PartitionSpec(BATCH_AXES), self._by_head(query.shape[1], key.shape[1])
        kv_heads = heads if key.shape[1] > 1 else rows
        encoded = jax.shard_map(
            partial(local, bounds=bounds),
            mesh=self.mesh,
            in_specs=(heads, kv_heads, kv_heads, rows),
            out_specs=heads,
            check_vma=False,  # the kernel does not declare how its results vary
        )(query, key, value, layout)
        return encoded.swapaxes(1, 2)[:, :seq]

    def _by_segment(
        self, query: Array, key: Array, value: Array, layout: Layout, *, bounds: Bounds
    ) -> Array:
        """With a static mask and segments; the grid leaves out blocks that the mask makes empty."""
        window, seq = bounds.window, query.shape[2]
        mask = (
            masks.CausalMask((seq, seq))
            if window is None or window >= seq
            else masks.LocalMask((seq, seq), window_size=(window - 1, 0), offset=0)
        )
        run = self._kernel(masks.MultiHeadMask([mask] * query.shape[1]), bounds)
        ids = kernel.SegmentIds(q=layout.segments, kv=layout.segments)
        encoded = jax.vmap(run)(query, key, value, ids)
        assert isinstance(encoded, jax.Array)  # a tuple only with residuals
        return encoded

    def _by_row(
        self, query: Array, key: Array, value: Array, layout: Layout, *, bounds: Bounds
    ) -> Array:
        """With a mask of each row, computed before the kernel, which skips its empty blocks."""

        def one(row: tuple[Array, Array, Array, Layout]) -> Array:
            query, key, value, layout = row
            run = self._kernel(layout.sees(layout, window=bounds.window)[None], bounds)
            # An array since the kernel was made, which it cannot branch on inside a trace.
            run.fwd_mask_info = run.fwd_mask_info._replace(is_dynamic_mask=True)
            encoded = run(query, key, value)
            assert isinstance(encoded, jax.Array)  # a tuple only with residuals
            return encoded

        return jax.lax.map(one, (query, key, value, layout))

    def _by_head(self, heads: int, kv_heads: int) -> PartitionSpec:
        """By row, and by head if each device then has the keys of its queries."""
        tp = self.mesh.shape[TP]
        divides = heads % tp == 0 and (kv_heads == 1 or kv_heads % tp == 0)
        return PartitionSpec(BATCH_AXES, TP) if divides else PartitionSpec(BATCH_AXES)

    def _kernel(
        self, mask: masks.MultiHeadMask | Bool[Array, "1 seq seq"], bounds: Bounds
    ) -> kernel.SplashAttentionKernel:
        """The kernel for a mask of each head, or of all heads."""
        block = next(size for size in _KERNEL_BLOCKS if mask.shape[-1] % size == 0)
        return kernel.make_splash_mha(
            mask,
            block_sizes=kernel.BlockSizes(
                block_q=block,
                block_kv=block,
                block_q_dkv=block,
                block_kv_dkv=block,
                block_q_dq=block,
                block_kv_dq=block,
            ),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=bounds.softcap,
            interpret=self.interpret,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layout:
    """Which sequences the positions of packed rows belong to.

    Attributes:
        positions: of each token in its sequence, from 0, as for RoPE.
        segments: number of each token's sequence in its row; equal numbers are contiguous, 0 is
            padding.
        prefixes: a further segment of earlier positions that each token attends to, its prompt's;
            None: rows do not share prompts.
    """

    positions: Int[Array, "*parts seq"]
    segments: Int[Array, "*parts seq"]
    prefixes: Int[Array, "*parts seq"] | None = None

    def sees(self, keys: Layout, *, window: int | None) -> Bool[Array, "*parts seq slots"]:
        """True where a position attends to one of `keys`."""
        behind = self.positions[..., :, None] - keys.positions[..., None, :]
        near = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        same = self.segments[..., :, None] == keys.segments[..., None, :]
        if self.prefixes is not None:
            same |= self.prefixes[..., :, None] == keys.segments[..., None, :]
        return near & same


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["layout"],
    meta_fields=["block", "flash", "prompt", "completion"],
)
@dataclass(frozen=True)
class PackedAttention:
    """`Attend` for rows of packed sequences.

    A position attends to itself and to earlier positions of its own sequence, at most `window` in
    all, so that a packed sequence is computed as if it had its own row.

    Queries are computed in bands, whose scores exist for about `block` queries at a time, forward
    and backward. The keys of a band are those of itself and of the bands before it that a window,
    or the longest completion, reaches; with shared prompts also those of the one prompt that began
    before them. Where these are more than half of the row, a band has the keys of the whole row.

    Attributes:
        layout: the rows' sequences.
        block: queries whose scores exist at a time.
        flash: the kernel to use, which never writes scores; None: plain XLA.
        prompt: most positions of a shared prompt.
        completion: most positions of a completion that shares its prompt; None: of any sequence, a
            row.
    """

    layout: Layout
    block: int = 512
    flash: FlashAttention | None = None
    prompt: int = 0
    completion: int | None = None

    def __call__(
        self, query: Queries, key: Keys, value: Keys, *, bounds: Bounds, cache: LayerCache
    ) -> tuple[Queries, LayerCache]:
        """See `Attend`; returns `cache` unchanged."""
        if self.flash is not None:
            return self.flash(query, key, value, bounds=bounds, layout=self.layout), cache
        assert self.layout.prefixes is None or self.prompt, "the longest shared prompt is unknown"
        window, softcap, seq = bounds.window, bounds.softcap, query.shape[1]

        def attend(
            query: Array, rows: Layout, key: Array, value: Array, columns: Layout
        ) -> Queries:
            visible = rows.sees(columns, window=window)
            return attend_where(query, key, value, visible=visible, softcap=softcap)

        everything = key, value, self.layout
        size, before = band_sizes(
            seq, window, block=self.block, prompt=self.prompt, completion=self.completion
        )
        bands = _Bands(self.layout, size, before or 0, self.prompt)
        columns = None if before is None else bands.keys(everything)
        rows = bands.split((query, self.layout))

        def some(bands: tuple[Any, Any]) -> Array:
            (query, rows), columns = bands
            if columns is None:
                return jax.vmap(attend, in_axes=(0, 0, None, None, None))(query, rows, *everything)
            return jax.vmap(attend)(query, rows, *columns)

        at_once = max(1, self.block // bands.size)
        if bands.count <= at_once:
            return bands.joined(some((rows, columns))), cache
        behind = -bands.count % at_once
        blocks = jax.tree.map(
            lambda x: jnp.pad(x, ((0, behind), *((0, 0) for _ in x.shape[1:]))).reshape(
                -1, at_once, *x.shape[1:]
            ),
            (rows, columns),
        )
        encoded = jax.lax.map(jax.checkpoint(some), blocks)
        return bands.joined(encoded.reshape(-1, *encoded.shape[2:])), cache


def band_sizes(
    seq: int,
    window: int | None,
    *,
    block: int = 512,
    prompt: int = 0,
    completion: int | None = None,
) -> tuple[int, int | None]:
    """Queries of a band of `PackedAttention`, and the earlier bands whose keys it has.

    The latter is None if a band has the keys of the whole row, which is faster unless bands have at
    most half as many.
    """
    reach = min(window or seq, completion or seq, seq)
    size = min(block, max(reach, _LEAST_BAND))
    before = -(-(reach - 1) // size)
    few = 2 * ((before + 1) * size + prompt) <= seq
    return (size, before) if few else (min(block, seq), None)


_LEAST_BAND = 64
"""Queries of a band, unless blocks are smaller."""


@dataclass(frozen=True)
class _Bands:
    """Rows in bands of consecutive positions, the last one padded.

    Attributes:
        layout: the rows' sequences.
        size: positions of a band.
        before: number of earlier bands whose keys a band has.
        prompt: most positions of a shared prompt.
    """

    layout: Layout
    size: int
    before: int
    prompt: int

    @property
    def seq(self) -> int:
        """Positions of a row."""
        return self.layout.positions.shape[1]

    @property
    def count(self) -> int:
        """Bands of a row."""
        return -(-self.seq // self.size)

    def split(self, arrays: Any) -> Any:
        """Arrays `batch seq *rest` as `count batch size *rest`."""

        def one(x: Array) -> Array:
            behind = self.count * self.size - self.seq
            padded = jnp.pad(x, ((0, 0), (0, behind), *((0, 0) for _ in x.shape[2:])))
            bands = padded.reshape(x.shape[0], self.count, self.size, *x.shape[2:])
            return jnp.moveaxis(bands, 1, 0)

        return jax.tree.map(one, arrays)

    def joined(self, bands: Float[Array, "bands batch size heads head_dim"]) -> Queries:
        """The inverse of `split`, for an array that may have further bands."""
        found = jnp.moveaxis(bands, 0, 1)
        return found.reshape(found.shape[0], -1, *found.shape[3:])[:, : self.seq]

    def keys(self, everything: tuple[Array, Array, Layout]) -> tuple[Array, Array, Layout]:
        """Keys, values and their layout, `count batch keys *rest`, that each band attends to."""

        def one(x: Array) -> Array:
            own = self.split(x)
            earlier = [
                jnp.pad(own[: -n or None], ((n, 0), *((0, 0) for _ in own.shape[1:])))[: self.count]
                for n in range(self.before, 0, -1)
            ]
            return jnp.concatenate([*earlier, own], axis=2)

        near = jax.tree.map(one, everything)
        if self.layout.prefixes is None:
            return near
        far = self._prompts(everything)
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), far, near)

    def _prompts(self, everything: tuple[Array, Array, Layout]) -> tuple[Array, Array, Layout]:
        """The prompt of each band's first query; no query sees what `near` keys repeat of it."""
        first = np.arange(self.count) * self.size
        assert self.layout.prefixes is not None
        prefix = self.layout.prefixes[:, first]
        start = jnp.argmax(self.layout.segments[:, None] == prefix[..., None], axis=-1)
        at = start[..., None] + np.arange(self.prompt)
        repeated = at >= first[:, None] - self.before * self.size
        at = jnp.minimum(at, self.seq - 1).reshape(at.shape[0], -1)

        def one(x: Array) -> Array:
            index = at.reshape(*at.shape, *(1 for _ in x.shape[2:]))
            found = jnp.take_along_axis(x, index, axis=1)
            bands = found.reshape(len(x), self.count, self.prompt, *x.shape[2:])
            return jnp.moveaxis(bands, 1, 0)

        key, value, layout = jax.tree.map(one, everything)
        segments = jnp.where(jnp.moveaxis(repeated, 1, 0), _NO_SEGMENT, layout.segments)
        return key, value, replace(layout, segments=segments)


_NO_SEGMENT = -1
"""Segment of keys that no query sees."""


def _causal(seq: int, *, window: int | None) -> Bool[Array, "seq seq"]:
    """True where a position (first axis) attends to another one (second axis)."""
    behind = jnp.arange(seq)[:, None] - jnp.arange(seq)[None, :]
    return (behind >= 0) & (behind < (seq if window is None else window))
