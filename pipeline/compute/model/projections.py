"""Conversion between our adapter and PEFT's, which adapts the projections of Hugging Face's models.

Some of our matrices hold several projections with one shared lora_a. Conversion to PEFT gives each
projection the whole lora_A, which is exact. Conversion from PEFT merges equal lora_A; different
lora_A are concatenated and lora_B is block-diagonal, which is exact, too, and takes the sum of
their ranks.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from pipeline.compute.model.tensors import PROJECTIONS

Shape = tuple[int, ...]
Pair = tuple[np.ndarray, np.ndarray]
"""A projection's lora_A, `rank in`, and lora_B, `out rank`."""


class Place(NamedTuple):
    """A projection of a layer, for example `self_attn.q_proj`."""

    layer: int
    projection: str


def places(matrix: str) -> list[Place]:
    """The projections in one of our matrices, `layers.N....`, in the order of its axis."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.\w+", matrix)
    assert match, matrix
    return [Place(int(match[1]), projection) for projection in PROJECTIONS[match[2]]]


def to_pairs(adapter: Mapping[str, np.ndarray | jax.Array]) -> dict[Place, Pair]:
    """Our adapter as PEFT's pairs: the same product for every projection, bit for bit."""
    pairs = {}
    for name in adapter:
        matrix, found, _ = name.rpartition("_lora_a")
        if not found:
            continue
        a, b = (np.asarray(adapter[f"{matrix}_lora_{half}"]) for half in "ab")
        rank, parts = b.shape[0], places(matrix)
        each = [b[:, number] for number in range(len(parts))] if len(parts) > 1 else [b]
        for place, out in zip(parts, each, strict=True):
            pairs[place] = a.reshape(-1, rank).T, out.reshape(rank, -1).T
    return pairs


def pair_shapes(matrix: str, a: Shape, b: Shape) -> dict[Place, tuple[int, int]]:
    """Columns of lora_A and rows of lora_B of each projection in a matrix of ours."""
    parts = places(matrix)
    rows = math.prod(b[1:]) // len(parts)
    return dict.fromkeys(parts, (math.prod(a[:-1]), rows))


def rank_needed(pairs: Sequence[Pair]) -> int:
    """Rank of a matrix of ours for these projections."""
    ranks = [pair[0].shape[0] for pair in pairs]
    return ranks[0] if shared(pairs) else sum(ranks)


def from_pairs(
    matrix: str, pairs: Mapping[Place, Pair], *, a: Shape, b: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """lora_a and lora_b of one of our matrices, with shapes `a` and `b`.

    A projection that is not in `pairs` is not changed. Surplus rank is initialised as a fresh
    adapter: lora_a uniform within 1 / sqrt(inputs), zero lora_b.
    """
    parts, room = places(matrix), b[0]
    present = [pairs[place] for place in parts if place in pairs]
    together = shared(present)
    assert rank_needed(present) <= room, (matrix, room)
    lora_a = _fresh_a(matrix, (math.prod(a[:-1]), room))
    lora_b = np.zeros((len(parts), room, math.prod(b[1:]) // len(parts)), np.float32)
    start = 0
    for number, place in enumerate(parts):
        if place in pairs:
            down, up = pairs[place]
            stop = start + down.shape[0]
            lora_a[:, start:stop] = down.T
            lora_b[number, start:stop] = up.T
            start = start if together else stop
    return lora_a.reshape(a), np.moveaxis(lora_b, 0, 1).reshape(b)


def shared(pairs: Sequence[Pair]) -> bool:
    """Whether these projections have the same lora_A."""
    return all(np.array_equal(a, pairs[0][0]) for a, _ in pairs)


def needs_separate_lora_a(pairs: Mapping[Place, Pair]) -> bool:
    """Whether projections in one matrix of ours have different lora_A.

    Keys and values always share a matrix. Queries share it, too, if there are as many query heads
    as kv heads, that is, if their lora_B have the same number of rows.
    """
    for layer in {place.layer for place in pairs}:
        fused = [
            pairs[place] for place in places(f"layers.{layer}.attn.kv_einsum.w") if place in pairs
        ]
        query = pairs.get(Place(layer, "self_attn.q_proj"))
        if query and fused and query[1].shape[0] == fused[0][1].shape[0]:
            fused.append(query)
        if fused and not shared(fused):
            return True
    return False


def _fresh_a(matrix: str, shape: tuple[int, int]) -> np.ndarray:
    """Values as those of `lora.fresh`, a function of the matrix name."""
    seed = int.from_bytes(hashlib.blake2b(matrix.encode(), digest_size=8).digest(), "little")
    bound = shape[0] ** -0.5
    return np.random.default_rng(seed).uniform(-bound, bound, shape).astype(np.float32)
