"""Measuring the engine: every program is timed, and sampling does not change."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from launch.bench.counting import compilations
from tests import tiny
from tests.pipeline.compute.decode.reference import generate

SIZES: dict[str, Any] = {"plan": {"slots": 8, "slot_buckets": (4, 2), "prompt_buckets": (6,)}}
EIGHT: dict[str, Any] = {"plan": {"learner_devices": 8, "slots": 16, "slot_buckets": (8,)}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tables", "devices", "segments", "buckets"),
    [(SIZES, 1, {8, 4, 2}, {6, 14}), (EIGHT, 8, {16, 8}, {14})],
)
def test_every_program_is_timed_and_sampling_does_not_change(
    tables: dict[str, Any], devices: int, segments: set[int], buckets: set[int]
):
    engine = tiny.engine(layers=2, **tables)
    mesh = {"devices": devices}
    base, adapter = tiny.base(layers=2, **mesh), tiny.probe(layers=2, **mesh)
    before = generate(engine, adapter=adapter)
    live = len(jax.live_arrays())
    with compilations() as compiled:
        found = engine.times(base, adapter)
    assert compiled == []
    assert len(jax.live_arrays()) == live
    assert found.segment_s.keys() == segments
    assert found.prefill_s.keys() == buckets
    for table in (found.segment_s, found.prefill_s):
        assert all(seconds > 0 for seconds in table.values())
    for one, other in zip(before, generate(engine, adapter=adapter), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
