"""Attention of packed rows with JAX's Pallas kernel for TPU (splash attention).

FlashAttention (arXiv:2205.14135) with segments and a static causal or windowed mask, whose empty
blocks are skipped. The compiler's cost model does not include the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from pipeline.compute.model.sharding import BATCH_AXES, TP

_BLOCKS = (512, 256, 128)
"""Block sizes of queries and keys: the largest that divides the row; the hardware's is 128."""


@dataclass(frozen=True)
class FlashAttention:
    """The kernel on a mesh: rows sharded over its batch axes, heads over tp if it divides them.

    Attributes:
        mesh: TPU devices.
        interpret: interpret the kernel without a TPU, which is slow.
    """

    mesh: Mesh
    interpret: bool = False

    def __call__(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        *,
        segments: Int[Array, "batch seq"],
        window: int | None,
        softcap: float | None,
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Encoded values; the mask is that of `PackedAttention`."""
        seq = query.shape[1]
        behind = -seq % _BLOCKS[-1]
        query, key, value = (
            jnp.pad(x, ((0, 0), (0, behind), (0, 0), (0, 0))).swapaxes(1, 2)
            for x in (query, key, value)
        )
        segments = jnp.pad(segments, ((0, 0), (0, behind)))

        def local(query: Array, key: Array, value: Array, segments: Array) -> Array:
            run = self._kernel(query.shape[1], query.shape[2], window=window, softcap=softcap)
            ids = kernel.SegmentIds(q=segments, kv=segments)
            encoded = jax.vmap(run)(query, key, value, ids)
            assert isinstance(encoded, jax.Array)  # a tuple only with residuals
            return encoded

        rows, heads = PartitionSpec(BATCH_AXES), self._by_head(query.shape[1], key.shape[1])
        kv_heads = heads if key.shape[1] > 1 else rows
        encoded = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(heads, kv_heads, kv_heads, rows),
            out_specs=heads,
            check_vma=False,  # the kernel does not declare how its results vary
        )(query, key, value, segments)
        return encoded.swapaxes(1, 2)[:, :seq]

    def _by_head(self, heads: int, kv_heads: int) -> PartitionSpec:
        """By row, and by head if each device then has the keys of its queries."""
        tp = self.mesh.shape[TP]
        divides = heads % tp == 0 and (kv_heads == 1 or kv_heads % tp == 0)
        return PartitionSpec(BATCH_AXES, TP) if divides else PartitionSpec(BATCH_AXES)

    def _kernel(
        self, heads: int, seq: int, *, window: int | None, softcap: float | None
    ) -> kernel.SplashAttentionKernel:
        shape = (seq, seq)
        mask = (
            masks.CausalMask(shape)
            if window is None or window >= seq
            else masks.LocalMask(shape, window_size=(window - 1, 0), offset=0)
        )
        block = next(size for size in _BLOCKS if seq % size == 0)
        return kernel.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
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
            attn_logits_soft_cap=softcap,
            interpret=self.interpret,
        )
