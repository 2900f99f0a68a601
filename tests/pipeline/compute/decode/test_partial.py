"""Truncated and continued rollouts: tokens, versions and log-probs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from launch.bench.harness import compilations
from pipeline.compute.decode.engine import Engine
from pipeline.compute.model.policy import Params
from pipeline.types import Completion, RolloutName, RolloutRequest
from tests import tiny
from tests.pipeline.compute.decode.reference import CONFIG, NEW, REQUESTS, generate, recompute
from tests.pipeline.compute.decode.test_engine import count_ties
from tests.samples import changed

TEMPERATURE = CONFIG.rollout.temperature
KEEP: dict[str, dict[str, Any]] = {
    "rollout": {"partial": "keep", "cut_off": 0.5},
    "learner": {"importance_cap": 2.0},
}
VERSIONS = (1, 2, 3)
BOUND = 2e-5
"""Bound of log-prob differences: prefill and decode round differently, and a random model has
positions that magnify rounding."""


def keeping(**tables: dict[str, Any]) -> Engine:
    """An engine that can continue truncated rollouts."""
    names = KEEP.keys() | tables.keys()
    merged = {name: KEEP.get(name, {}) | tables.get(name, {}) for name in names}
    return tiny.engine(layers=4, **merged)


def adapter_of(version: int) -> Params:
    """The adapter of a version; `reference` and `recompute` use that of version 1."""
    return tiny.make_probe(tiny.policy(), seed=version)


def sample(
    engine: Engine,
    requests: Sequence[RolloutRequest],
    *,
    version: int = 1,
    min_finished: int | None = None,
    adapter: Params | None = None,
) -> list[Completion]:
    """Samples under the adapter of this version, whose hash is its number."""
    return engine.generate(
        requests,
        adapter=adapter_of(version) if adapter is None else adapter,
        version=version,
        adapter_sha256=str(version),
        temperature=TEMPERATURE,
        min_finished=min_finished,
    )


def continue_requests(completions: Sequence[Completion]) -> list[RolloutRequest]:
    """Requests that continue the truncated completions."""
    return [
        RolloutRequest(one.name, one.prompt_tokens, partial=one)
        for one in completions
        if one.stop_reason == "truncated"
    ]


def truncated(completion: Completion, size: int) -> Completion:
    """The completion truncated to `size` tokens."""
    tokens, logprobs = completion.tokens[:size], completion.logprobs[:size]
    short = changed(completion, tokens=tokens, logprobs=logprobs)
    return dataclasses.replace(short, stop_reason="truncated")


def sample_in_parts(
    engine: Engine, requests: Sequence[RolloutRequest], *, min_finished: int, **given: Any
) -> list[Completion]:
    """Truncates and continues repeatedly under one adapter; in the order of the requests."""
    found: dict[RolloutName, Completion] = {}
    pending = list(requests)
    while pending:
        sampled = sample(engine, pending, min_finished=min_finished, **given)
        ended = sum(one.stop_reason != "truncated" for one in sampled)
        assert ended >= min(min_finished, len(pending))
        found |= {one.name: one for one in sampled}
        pending = continue_requests(sampled)
    return [found[request.name] for request in requests]


@pytest.fixture(scope="module")
def whole() -> list[Completion]:
    """Completions without truncation."""
    return sample(tiny.engine(), REQUESTS)


def test_a_rollout_can_be_truncated_after_any_token(whole: list[Completion]):
    longest = sorted(whole, key=lambda one: -len(one.tokens))[:3]
    engine = keeping()
    # Every place in a segment of four steps, and in the windows.
    for size in range(1, len(longest[0].tokens), 3):
        expected = [one for one in longest if size < len(one.tokens)]
        parts = [truncated(one, size) for one in expected]
        found = sample(engine, continue_requests(parts))
        assert count_ties(expected, found, bound=BOUND) == 0
        assert engine.work.tokens == sum(len(one.tokens) - size for one in found)
        for one, before in zip(found, parts, strict=True):
            np.testing.assert_array_equal(one.logprobs[:size], before.logprobs)
            first, _ = one.segments
            assert (first.version, first.adapter_sha256, len(first.tokens)) == (1, "1", size)


def test_promise_1_each_token_has_the_version_that_sampled_it():
    engine, requests = keeping(), list(REQUESTS)
    found: dict[RolloutName, Completion] = {}
    for version in VERSIONS:
        sampled = sample(
            engine, requests, version=version, min_finished=4 if version < VERSIONS[-1] else None
        )
        for request, one in zip(requests, sampled, strict=True):
            assert (one.version, one.adapter_sha256) == (version, str(version))
            if request.partial is not None:
                size = len(request.partial.tokens)
                np.testing.assert_array_equal(one.tokens[:size], request.partial.tokens)
                np.testing.assert_array_equal(one.logprobs[:size], request.partial.logprobs)
        found |= {one.name: one for one in sampled}
        requests = continue_requests(sampled)
    completions = list(found.values())
    assert {len(one.segments) for one in completions} >= {1, 2}
    for version in VERSIONS:
        scored = recompute(completions, adapter=adapter_of(version))
        for one, (logprobs, noisy) in zip(completions, scored, strict=True):
            own = one.versions == version
            # The best noisy score, given all earlier tokens, under this version and this name.
            np.testing.assert_array_equal(one.tokens[own], noisy.argmax(axis=1)[own])
            picked = logprobs[np.arange(len(one.tokens)), one.tokens]
            np.testing.assert_allclose(one.logprobs[own], picked[own], rtol=0, atol=BOUND)


def test_a_request_without_a_slot_is_truncated_to_no_tokens_and_can_be_repeated(
    whole: list[Completion],
):
    engine = keeping()
    sampled = sample(engine, REQUESTS, version=2, min_finished=1)
    # Four slots: the others have not started.
    empty = [one for one in sampled if not len(one.tokens)]
    assert len(empty) >= len(REQUESTS) - 2 * 4
    for one in empty:
        assert (one.stop_reason, len(one.segments), one.version) == ("truncated", 1, 2)
        assert (len(one.logprobs), one.processed_logprobs) == (0, None)
    names = {one.name for one in empty}
    found = sample(engine, continue_requests(empty))
    assert count_ties([one for one in whole if one.name in names], found) == 0


def test_tokens_of_the_partial_completion_count_in_the_limit(whole: list[Completion]):
    long = next(one for one in whole if len(one.tokens) == NEW)
    (request,) = continue_requests([truncated(long, 9)])
    (found,) = sample(keeping(), [dataclasses.replace(request, max_new_tokens=11)])
    np.testing.assert_array_equal(found.tokens, long.tokens[:11])
    assert found.stop_reason == "length"


@pytest.fixture(scope="module")
def truncating() -> Engine:
    """An engine with top-k, top-p and min-p, made after clearing JAX's caches."""
    rollout = {**KEEP["rollout"], "top_k": 12, "top_p": 0.8, "min_p": 0.1, "stop_strings": ["~~"]}
    config = tiny.make_config(**KEEP | {"rollout": rollout})
    assert config.prompt_buckets == (14, 28, 42)
    policy, base = tiny.policy(layers=2), tiny.base(layers=2)
    _ = tiny.probe(layers=2)
    jax.clear_caches()
    return Engine(policy, base, config, tiny.VOCABULARY, text_of=tiny.text_of)


def test_promise_7_nothing_is_compiled_after_construction(truncating: Engine):
    adapter = tiny.probe(layers=2)
    with compilations() as seen:
        for count, temperature in ((1, 0.8), (4, 0.0), (7, 1.3)):
            generate(truncating, REQUESTS[:count], temperature=temperature, adapter=adapter)
        sample_in_parts(truncating, REQUESTS, min_finished=3, adapter=adapter)
    assert seen == []


def test_processed_logprobs_are_continued_too(truncating: Engine):
    adapter = tiny.probe(layers=2)
    expected = sample(truncating, REQUESTS, adapter=adapter)
    found = sample_in_parts(truncating, REQUESTS, min_finished=2, adapter=adapter)
    assert max(len(one.segments) for one in found) >= 3
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        assert one.processed_logprobs is not None
        assert two.processed_logprobs is not None
        np.testing.assert_allclose(
            one.processed_logprobs, two.processed_logprobs, rtol=0, atol=1e-5
        )
        np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=1e-5)
    (*_, last) = sample(truncating, REQUESTS, adapter=adapter, min_finished=1)
    assert last.processed_logprobs is not None
    assert (len(last.tokens), len(last.processed_logprobs)) == (0, 0)
