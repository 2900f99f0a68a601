"""Thresholds against a sort in NumPy."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pipeline.compute.model.head import FORBIDDEN
from pipeline.compute.model.sharding import VOCAB_AXES, make_mesh
from pipeline.compute.model.truncation import Truncation, threshold

VOCAB = 24
MESHES = [(1, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]


def mesh(data: int, fsdp: int, tp: int) -> Any:
    return make_mesh(jax.devices()[: data * fsdp * tp], fsdp=fsdp, tp=tp)


@cache
def compiled(truncation: Truncation, on: tuple[int, int, int]) -> Any:
    return jax.jit(
        jax.shard_map(
            lambda scores: threshold(scores, truncation=truncation),
            mesh=mesh(*on),
            in_specs=PartitionSpec(None, VOCAB_AXES),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )


def stays(scores: np.ndarray, truncation: Truncation, on: Any = (1, 1, 1)) -> np.ndarray:
    """Mask of the kept tokens, `rows vocab`."""
    scores = np.asarray(scores, np.float32)
    return scores >= np.asarray(compiled(truncation, on)(scores))[:, None]


def sorted_out(scores: np.ndarray, truncation: Truncation) -> tuple[np.ndarray, float]:
    """The mask of one row by definition, and the smallest distance of a nucleus' mass from p."""
    lowest, gap = np.float32(np.nextafter(np.float32(FORBIDDEN), np.float32(0))), np.inf
    ranked = np.sort(scores)[::-1]
    if 0 < truncation.top_k < len(scores):
        lowest = max(lowest, ranked[truncation.top_k - 1])
    if truncation.top_p < 1:
        left = ranked[ranked >= lowest]
        masses = np.exp(left.astype(np.float64) - left[0])
        # Ties are kept or removed together.
        reached = np.array([masses[left >= score].sum() for score in left]) / masses.sum()
        gap = np.abs(reached[left > left[-1]] - truncation.top_p).min(initial=np.inf)
        lowest = max(lowest, left[np.flatnonzero(reached >= min(truncation.top_p, reached[-1]))[0]])
    if truncation.min_p:
        lowest = max(lowest, np.float32(ranked[0] + np.float32(np.log(truncation.min_p))))
    return scores >= lowest, gap


TRUNCATIONS = [
    Truncation(top_k, top_p, min_p)
    for top_k in (0, 3, 99)
    for top_p in (1.0, 0.5)
    for min_p in (0.0, 0.05)
]


@given(
    # Few distinct values, so that many tie, with signed zeros and large values.
    st.lists(
        st.sampled_from([-2e4, -40.0, -1.5, -1e-3, -0.0, 0.0, 1e-3, 0.5, 2.0, 2.5, 3e4]),
        min_size=VOCAB,
        max_size=VOCAB,
    )
    | st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB),
    st.sampled_from(TRUNCATIONS),
    st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1),
)
def test_the_threshold_equals_that_of_a_sort(
    values: list[float], truncation: Truncation, banned: set[int]
):
    scores = np.array(values, np.float32)
    scores[np.abs(scores) < np.finfo(np.float32).tiny] = 0.0  # devices flush these to zero
    scores[list(banned)] = FORBIDDEN
    expected, gap = sorted_out(scores, truncation)
    assume(gap > 1e-5)
    np.testing.assert_array_equal(stays(scores[None], truncation)[0], expected)
    assert expected[scores.argmax()]
    assert not expected[list(banned)].any()


@pytest.mark.parametrize("on", MESHES[1:])
def test_shards_of_the_vocabulary_change_nothing(on: tuple[int, int, int]):
    truncation = Truncation(top_k=23, top_p=0.97, min_p=0.05)
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((40, VOCAB)).astype(np.float32) * 3
    scores[20:] = scores[20:].round()  # with ties
    scores[:, rng.permutation(VOCAB)[:4]] = FORBIDDEN
    found = stays(scores, truncation, on)
    np.testing.assert_array_equal(found, stays(scores, truncation))
    np.testing.assert_array_equal(found, [sorted_out(row, truncation)[0] for row in scores])
