"""Measuring the engine: every program is timed, and sampling does not change."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from launch.bench.harness import compilations
from tests import tiny
from tests.pipeline.compute.decode.reference import generate


@pytest.mark.slow
def test_every_program_is_timed_and_sampling_does_not_change():
    plan = {"learner_devices": 8, "slots": 16, "slot_buckets": (8,), "prompt_buckets": (6,)}
    engine = tiny.engine(layers=2, plan=plan)
    base, adapter = tiny.base(layers=2, devices=8), tiny.probe(layers=2, devices=8)
    before = generate(engine, adapter=adapter)
    live = len(jax.live_arrays())
    with compilations() as compiled:
        found = engine.times(base, adapter)
    assert compiled == []
    assert len(jax.live_arrays()) == live
    assert found.segment_s.keys() == {16, 8}
    assert found.prefill_s.keys() == {6, 14}
    for table in (found.segment_s, found.prefill_s):
        assert all(seconds > 0 for seconds in table.values())
    for one, other in zip(before, generate(engine, adapter=adapter), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
