"""Rollouts that are cut and continued: which adapter each token is of, and what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.bench.counting import compilations
from pipeline.compute.decode.engine import Engine
from pipeline.compute.decode.stopping import StopStrings
from pipeline.compute.model.policy import Params
from pipeline.contracts.rollouts import Completion, RolloutName, RolloutRequest, VersionSpan
from tests import tiny
from tests.pipeline.compute.decode.test_engine import count_ties, same_bits
from tests.pipeline.compute.decode.test_engine_property import TIE, prompt, reference
from tests.pipeline.compute.decode.written_out import CONFIG, NEW, REQUESTS, recompute

HEAT = CONFIG.rollout.temperature
KEEP: dict[str, dict[str, Any]] = {
    "rollout": {"partial": "keep", "cut_off": 0.5},
    "learner": {"importance_cap": 2.0},
}
VERSIONS = (1, 2, 3)
BOUND = 2e-5
"""Of log-probs: a prefix that is prefilled rounds otherwise than one that was decoded, and a random
model has positions that magnify that; see test_engine_property.py."""


def keeping(*, layers: int = 7, **tables: dict[str, Any]) -> Engine:
    """An engine that can go on with what was cut."""
    names = KEEP.keys() | tables.keys()
    merged = {name: KEEP.get(name, {}) | tables.get(name, {}) for name in names}
    return tiny.engine(layers=layers, **merged)


def adapter_of(version: int) -> Params:
    """That of version 1 is the one that `reference` and `recompute` draw under."""
    return tiny.make_probe(tiny.policy(), seed=version)


def draw(
    engine: Engine,
    requests: Sequence[RolloutRequest],
    *,
    version: int = 1,
    min_finished: int | None = None,
    adapter: Params | None = None,
) -> list[Completion]:
    """Under the adapter of this version, whose hash is its number."""
    return engine.generate(
        requests,
        adapter=adapter_of(version) if adapter is None else adapter,
        version=version,
        adapter_sha256=str(version),
        temperature=HEAT,
        min_finished=min_finished,
    )


def again(completions: Sequence[Completion]) -> list[RolloutRequest]:
    """Asks for the rest of those that were cut."""
    return [
        RolloutRequest(one.name, one.prompt_tokens, begun=one)
        for one in completions
        if one.stop_reason == "cut"
    ]


def shortened(completion: Completion, size: int) -> Completion:
    """As if it had been cut behind so many tokens."""
    tokens, logprobs = completion.tokens[:size], completion.logprobs[:size]
    return dataclasses.replace(completion, tokens=tokens, logprobs=logprobs, stop_reason="cut")


def by_and_by(
    engine: Engine, requests: Sequence[RolloutRequest], *, min_finished: int, **given: Any
) -> list[Completion]:
    """Cut again and again, under one adapter; in the order of the requests."""
    found: dict[RolloutName, Completion] = {}
    asked = list(requests)
    while asked:
        drawn = draw(engine, asked, min_finished=min_finished, **given)
        assert sum(one.stop_reason != "cut" for one in drawn) >= min(min_finished, len(asked))
        found |= {one.name: one for one in drawn}
        asked = again(drawn)
    return [found[request.name] for request in requests]


@pytest.fixture(scope="module")
def whole() -> list[Completion]:
    """None of them was cut."""
    return draw(tiny.engine(), REQUESTS)


@pytest.mark.parametrize(
    ("plan", "enough"),
    [
        ({}, 1),
        ({"segment_steps": 1}, 2),
        ({"segment_steps": 7, "slots": 8, "slot_buckets": (2,), "prompt_buckets": (6,)}, 2),
    ],
)
def test_cut_and_continued_under_the_same_adapter_it_is_the_rollout_that_was_not_cut(
    whole: list[Completion], plan: dict[str, Any], min_finished: int
):
    engine = keeping(plan=plan)
    found = by_and_by(engine, REQUESTS, min_finished=min_finished)
    assert count_ties(whole, found, bound=BOUND) == 0
    assert [one.stop_reason for one in found] == [one.stop_reason for one in whole]
    assert max(len(one.begun) for one in found) >= 2
    for one in found:
        assert sum(stretch.tokens for stretch in one.version_spans) == len(one.tokens)
        assert {(s.version, s.adapter_sha256) for s in one.version_spans} == {(1, "1")}


def test_it_may_be_cut_behind_any_of_its_tokens(whole: list[Completion]):
    longest = sorted(whole, key=lambda one: -len(one.tokens))[:3]
    engine = keeping()
    for size in range(1, len(longest[0].tokens)):
        expected = [one for one in longest if size < len(one.tokens)]
        begun = [shortened(one, size) for one in expected]
        found = draw(engine, again(begun))
        assert count_ties(expected, found, bound=BOUND) == 0
        assert engine.work.tokens == sum(len(one.tokens) - size for one in found)
        for one, before in zip(found, begun, strict=True):
            np.testing.assert_array_equal(one.logprobs[:size], before.logprobs)
            assert one.begun == (VersionSpan(1, "1", size),)


def test_invariant_1_each_token_is_of_the_version_that_drew_it():
    engine, asked = keeping(), list(REQUESTS)
    found: dict[RolloutName, Completion] = {}
    for version in VERSIONS:
        drawn = draw(
            engine, asked, version=version, min_finished=4 if version < VERSIONS[-1] else None
        )
        for request, one in zip(asked, drawn, strict=True):
            assert (one.version, one.adapter_sha256) == (version, str(version))
            if request.begun is not None:
                size = len(request.begun.tokens)
                np.testing.assert_array_equal(one.tokens[:size], request.begun.tokens)
                np.testing.assert_array_equal(one.logprobs[:size], request.begun.logprobs)
        found |= {one.name: one for one in drawn}
        asked = again(drawn)
    completions = list(found.values())
    assert {len(one.version_spans) for one in completions} >= {1, 2}
    for version in VERSIONS:
        scored = recompute(completions, HEAT, adapter=adapter_of(version))
        for one, (logprobs, noisy) in zip(completions, scored, strict=True):
            own = one.versions == version
            # The best at its place, given all before it, under this version and the name's noise.
            np.testing.assert_array_equal(one.tokens[own], noisy.argmax(axis=1)[own])
            picked = logprobs[np.arange(len(one.tokens)), one.tokens]
            np.testing.assert_allclose(one.logprobs[own], picked[own], rtol=0, atol=BOUND)


def test_who_was_not_let_in_comes_back_empty_and_has_lost_nothing(whole: list[Completion]):
    engine = keeping()
    drawn = draw(engine, REQUESTS, version=2, min_finished=1)
    # Four slots: the others have not been looked at.
    empty = [one for one in drawn if not len(one.tokens)]
    assert len(empty) >= len(REQUESTS) - 2 * 4
    for one in empty:
        assert (one.stop_reason, one.version_spans, one.version) == ("cut", (), 2)
        assert one.tokens.dtype == np.int32
        assert one.logprobs.dtype == np.float32
        assert (len(one.logprobs), one.processed_logprobs) == (0, None)
    names = {one.name for one in empty}
    found = draw(engine, again(empty))
    assert count_ties([one for one in whole if one.name in names], found) == 0
    assert all(one.begun == () for one in found)
    # Who waits once more keeps what it has, under the label of who had no time for it.
    begun = [one for one in drawn if one.stop_reason == "cut" and len(one.tokens)]
    later = draw(engine, again([*empty[:12], *begun]), version=3, min_finished=1)[12:]
    for one, before in zip(later, begun, strict=True):
        assert (one.stop_reason, one.version) == ("cut", 3)
        assert (
            one.version_spans == before.version_spans == (VersionSpan(2, "2", len(before.tokens)),)
        )
        same_bits([one], [before])


def test_enough_is_all_or_more_than_all(whole: list[Completion]):
    for min_finished in (len(REQUESTS), len(REQUESTS) + 1):
        same_bits(draw(tiny.engine(), REQUESTS, min_finished=min_finished), whole)
    assert {one.stop_reason for one in draw(tiny.engine(), REQUESTS, min_finished=0)} == {"cut"}


def test_what_it_has_counts_in_its_limit(whole: list[Completion]):
    long = next(one for one in whole if len(one.tokens) == NEW)
    (request,) = again([shortened(long, 9)])
    (found,) = draw(keeping(), [dataclasses.replace(request, max_new_tokens=11)])
    np.testing.assert_array_equal(found.tokens, long.tokens[:11])
    assert found.stop_reason == "length"
    with pytest.raises(ValueError, match=r"max_new_tokens = 9: must be from 10 to .* = 28"):
        draw(keeping(), [dataclasses.replace(request, max_new_tokens=9)])


def test_what_is_begun_and_too_long_to_be_read_is_named(whole: list[Completion]):
    long = next(one for one in whole if len(one.tokens) == NEW)
    (request,) = again([shortened(long, NEW - 1)])
    read = len(request.read_tokens)
    assert read > CONFIG.rollout.max_prompt_tokens
    with pytest.raises(ValueError, match=rf"begun completion {NEW - 1}: at most 14 are read"):
        draw(tiny.engine(), [request])


def test_a_stop_string_may_have_begun_before_the_cut(
    whole: list[Completion], monkeypatch: pytest.MonkeyPatch
):
    engine = keeping(plan={"segment_steps": 1})
    long = next(one for one in whole if len(one.tokens) > 8)
    (request,) = [one for one in REQUESTS if one.name == long.name]
    string = tiny.text_of(long.tokens[4:7])
    assert len(string) == 3
    monkeypatch.setattr(engine, "_stop_strings", StopStrings((string,), tiny.text_of))
    for asked in (request, *again([shortened(long, 6)])):
        (found,) = draw(engine, [asked])
        assert found.stop_reason == "stop_string"
        np.testing.assert_array_equal(found.tokens, long.tokens[:7])


def test_what_was_drawn_from_is_kept_too():
    rollout = {**KEEP["rollout"], "top_k": 12, "top_p": 0.8, "min_p": 0.1}
    engine = keeping(layers=2, rollout=rollout)
    adapter = tiny.probe(layers=2)
    expected = draw(engine, REQUESTS, adapter=adapter)
    found = by_and_by(engine, REQUESTS, min_finished=2, adapter=adapter)
    assert max(len(one.begun) for one in found) >= 2
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        assert one.processed_logprobs is not None
        assert two.processed_logprobs is not None
        np.testing.assert_allclose(
            one.processed_logprobs, two.processed_logprobs, rtol=0, atol=1e-5
        )
        np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=1e-5)
    (*_, last) = draw(engine, REQUESTS, adapter=adapter, min_finished=1)
    assert last.processed_logprobs is not None
    assert (len(last.tokens), len(last.processed_logprobs)) == (0, 0)


PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"slots": 16, "segment_steps": 5, "learner_devices": 8},
)
SIZES = st.dictionaries(st.integers(0, 40), st.integers(1, 6), min_size=1, max_size=6)
"""Rollouts of each prompt."""


@settings(max_examples=8)
@given(st.sampled_from(PLANS), SIZES, st.integers(1, 12))
def test_however_often_it_is_cut_each_rollout_is_what_it_is_alone(
    plan: dict[str, Any], sizes: dict[int, int], min_finished: int
):
    requests = [
        RolloutRequest(RolloutName("train", 0, number, sample), prompt(number))
        for number, size in sizes.items()
        for sample in range(size)
    ]
    adapter = tiny.probe(devices=plan.get("learner_devices", 1))
    found = by_and_by(keeping(plan=plan), requests, min_finished=min_finished, adapter=adapter)
    for request, completion in zip(requests, found, strict=True):
        alone = reference(request.name, request.prompt_tokens.tobytes())
        same = len(alone.tokens)
        if completion.tokens.tolist() != alone.tokens:
            # Another shape rounds otherwise: only a tie may then fall the other way.
            pairs = zip(completion.tokens, alone.tokens, strict=False)
            same = next(n for n, (one, other) in enumerate(pairs) if one != other)
            assert alone.margin[same] < TIE
        np.testing.assert_allclose(
            completion.logprobs[:same], alone.logprobs[:same], rtol=0, atol=5e-5
        )


def test_invariant_4_what_is_continued_compiles_nothing():
    policy, base, adapter = tiny.policy(layers=2), tiny.base(layers=2), tiny.probe(layers=2)
    config = tiny.make_config(**KEEP)
    assert config.prompt_buckets == (14, 28, 42)
    jax.clear_caches()
    engine = Engine(policy, base, config, tiny.VOCABULARY)
    with compilations() as seen:
        by_and_by(engine, REQUESTS, min_finished=3, adapter=adapter)
    assert seen == []
