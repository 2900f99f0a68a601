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
    generate,
)


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


@functools.cache
def sampled() -> list[Completion]:
    """24 rollouts in four slots."""
    return generate(make_engine(), adapter=adapter())


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
    plan: dict[str, Any], mesh: dict[str, int]
):
    devices = {"devices": plan["learner_devices"], **mesh} if "learner_devices" in plan else {}
    found = generate(make_engine(**plan), adapter=adapter(**devices))
    for one, two in zip(found, sampled(), strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=1e-4)
