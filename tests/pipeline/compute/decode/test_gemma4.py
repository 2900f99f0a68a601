"""Rollouts of a Gemma 4, whose last layers read the rings of earlier ones."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.compute.decode.engine import Engine
from pipeline.compute.model.policy import Params, Policy
from pipeline.types import Completion
from tests import tiny
from tests.pipeline.compute.decode.reference import (
    CONFIG,
    REQUESTS,
    generate,
)
from tests.pipeline.compute.decode.test_engine import same_bits


@functools.cache
def policy(**mesh: Any) -> Policy:
    return tiny.make_policy(**mesh, **tiny.GEMMA4)


def make_engine(**plan: Any) -> Engine:
    config = tiny.make_config(plan=plan)
    mesh = {"devices": config.plan.devices_per_sampler, "fsdp": config.plan.fsdp_of_sampler}
    plain = policy(**mesh, tp=config.plan.tp_of_sampler)
    found = replace(plain, embeddings_in_host=config.plan.embeddings_in_host)
    base = found.stored_base(tiny.make_base(plain).items())
    return Engine(found, base, config, tiny.VOCABULARY, text_of=tiny.text_of)


@functools.cache
def adapter(**mesh: Any) -> Params:
    return tiny.make_probe(policy(**mesh))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def sampled(engine: Engine) -> list[Completion]:
    """24 rollouts in four slots."""
    return generate(engine, adapter=adapter())


def test_layers_with_shared_keys_and_values_have_no_cache(engine: Engine):
    state = engine._programs.empty()
    total = CONFIG.rollout.max_tokens
    shapes = [ring[0].shape for ring in state.caches]
    assert shapes == [(4, 2, tiny.WINDOW, 8), (4, 2, total, 16)]
    # Keys and values, 2 kv heads, 4 bytes.
    found = tiny.bytes_per_row(policy().architecture, max_tokens=total)
    assert found == 2 * 2 * 4 * (tiny.WINDOW * 8 + total * 16)


def test_promise_2_a_rollout_is_bitwise_independent_of_slot_and_neighbours(
    engine: Engine, sampled: list[Completion]
):
    order = np.random.default_rng(0).permutation(len(REQUESTS))
    mixed = generate(engine, [REQUESTS[n] for n in order], adapter=adapter())
    same_bits(mixed, [sampled[n] for n in order])
    same_bits(generate(engine, REQUESTS[1:2], adapter=adapter()), sampled[1:2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        ({"slots": 8, "prompt_buckets": (6,), "segment_steps": 7, "slot_buckets": (2,)}, {}),
        ({"learner_devices": 8, "slots": 8, "fsdp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}),
        ({"learner_devices": 8, "slots": 8, "per_layer_embeddings": "host"}, {}),
    ],
    ids=["other sizes", "sharded weights", "embeddings in host memory"],
)
def test_promise_2_other_sizes_and_devices_sample_the_same(
    sampled: list[Completion], plan: dict[str, Any], mesh: dict[str, int]
):
    devices = {"devices": plan["learner_devices"], **mesh} if "learner_devices" in plan else {}
    found = generate(make_engine(**plan), adapter=adapter(**devices))
    for one, two in zip(found, sampled, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=1e-4)
