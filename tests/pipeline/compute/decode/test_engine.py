"""The engine: sampled tokens, independence of neighbours, stop conditions, and truncation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.compute.decode.engine import Aborted
from pipeline.types import Completion, RolloutName, RolloutRequest
from tests import tiny
from tests.pipeline.compute.decode.reference import (
    LONGEST,
    NEW,
    REQUESTS,
    check_tokens,
    generate,
    recompute,
)

STOPS = tiny.VOCABULARY.stops
EIGHT = {"learner_devices": 8, "slots": 8}


@pytest.fixture(scope="module")
def sampled() -> list[Completion]:
    """24 rollouts sampled in four slots, with all prompts in one bucket."""
    return generate(tiny.engine())


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_decoding_with_a_cache_equals_a_forward_pass_without(
    sampled: list[Completion], temperature: float
):
    completions = sampled if temperature else generate(tiny.engine(), temperature=0.0)
    assert max(len(c.tokens) for c in completions) > 3 * tiny.WINDOW
    check_tokens(completions, temperature)


def test_completions_match_their_requests(sampled: list[Completion]):
    assert [c.name for c in sampled] == [request.name for request in REQUESTS]
    for completion, request in zip(sampled, REQUESTS, strict=True):
        np.testing.assert_array_equal(completion.prompt_tokens, request.prompt_tokens)
        assert (completion.version, completion.adapter_sha256) == (3, "abc")
        assert completion.tokens.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert completion.tokens.shape == completion.logprobs.shape
    tokens = np.concatenate([c.tokens for c in sampled])
    assert not np.isin(tokens, tiny.VOCABULARY.forbidden).any()
    assert generate(tiny.engine(), []) == []


def test_promise_1_a_stop_token_is_kept_and_an_ending_by_length_gets_none(
    sampled: list[Completion],
):
    ended = [c for c in sampled if c.stop_reason == "eos"]
    assert {int(c.tokens[-1]) for c in ended} == set(STOPS)
    for completion in ended:
        assert completion.logprobs[-1] < 0
        assert not np.isin(completion.tokens[:-1], STOPS).any()
    full = [c for c in sampled if c.stop_reason == "length"]
    assert full
    for completion in full:
        assert len(completion.tokens) == NEW
        assert not np.isin(completion.tokens, STOPS).any()
        assert (completion.logprobs < 0).all()


def same_bits(first: Sequence[Completion], second: Sequence[Completion]) -> None:
    for one, two in zip(first, second, strict=True):
        assert one.name == two.name
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.logprobs, two.logprobs)
        assert one.stop_reason == two.stop_reason


def test_promise_2_a_rollout_is_bitwise_independent_of_slot_and_neighbours(
    sampled: list[Completion],
):
    order = np.random.default_rng(0).permutation(len(REQUESTS))
    assert not (order % 4 == np.arange(len(order)) % 4).all()
    mixed = generate(tiny.engine(), [REQUESTS[n] for n in order])
    same_bits(mixed, [sampled[n] for n in order])
    # Three of four slots are empty.
    same_bits(generate(tiny.engine(), REQUESTS[1:2]), sampled[1:2])
    same_bits(generate(tiny.engine(), REQUESTS[7:9]), sampled[7:9])


def test_promise_2_another_name_gives_other_noise(sampled: list[Completion]):
    name = REQUESTS[0].name
    changed = [
        dataclasses.replace(name, phase="test"),
        dataclasses.replace(name, step=1),
        dataclasses.replace(name, prompt_id=99),
        dataclasses.replace(name, sample=1),
    ]
    requests = [RolloutRequest(n, REQUESTS[0].prompt_tokens) for n in changed]
    others = generate(tiny.engine(), requests)
    assert len({c.tokens.tobytes() for c in (*others, sampled[0])}) == 5


def count_ties(
    first: Sequence[Completion], second: Sequence[Completion], *, bound: float = 1e-5
) -> int:
    """Number of rollouts that differ.

    Asserts that at the first different token the two best scores are within `bound`, and that the
    log-probs of all earlier tokens agree to `bound`.
    """
    ties = 0
    scored = recompute(first)
    for one, two, (_, scores) in zip(first, second, scored, strict=True):
        shorter = min(len(one.tokens), len(two.tokens))
        differs = np.flatnonzero(one.tokens[:shorter] != two.tokens[:shorter])
        same = differs[0] if len(differs) else shorter
        if len(differs):
            best, next_best = np.sort(scores[same])[:-3:-1]
            assert best - next_best < bound, (one.name, same)
            ties += 1
        else:
            assert len(one.tokens) == len(two.tokens)
        np.testing.assert_allclose(one.logprobs[:same], two.logprobs[:same], rtol=0, atol=bound)
    return ties


def test_promise_2_across_batch_sizes_and_buckets_only_ties_differ(sampled: list[Completion]):
    # Other numbers of slots, prompt buckets and segment steps.
    other = tiny.engine(plan={"slots": 8, "prompt_buckets": (6,), "segment_steps": 7})
    found = generate(other)
    assert count_ties(sampled, found) == 0
    assert any((a.logprobs != b.logprobs).any() for a, b in zip(sampled, found, strict=True))


def test_promise_2_the_last_rollouts_move_to_fewer_slots(sampled: list[Completion]):
    engine = tiny.engine(plan={"slot_buckets": (2, 1), "segment_steps": 3})
    assert count_ties(sampled, generate(engine)) == 0
    assert set(engine.work.segments) >= {4, 2}
    assert engine.work.tokens == sum(len(c.tokens) for c in sampled)
    assert engine.work.slot_steps == 3 * sum(
        slots * count for slots, count in engine.work.segments.items()
    )
    # With so few requests, no segment has four slots.
    for first, size in ((3, 2), (1, 1)):
        few = slice(first, first + size)
        assert count_ties(sampled[few], generate(engine, REQUESTS[few])) == 0
        assert max(engine.work.segments) == size


def test_the_prompt_of_a_group_is_prefilled_once(monkeypatch: pytest.MonkeyPatch):
    prompts = [request.prompt_tokens for request in REQUESTS[1:6]]
    # More members than slots: some wait while others decode.
    requests = [
        RolloutRequest(RolloutName("train", 0, number, sample), prompt)
        for sample in range(6)
        for number, prompt in enumerate(prompts)
    ]
    engine = tiny.engine()
    programs, read = engine._programs, []

    def watched(*args: Any) -> Any:
        read.append(np.asarray(args[3]))
        return programs.prefill[LONGEST](*args)

    prefill: Any = {LONGEST: watched}
    monkeypatch.setattr(engine, "_programs", dataclasses.replace(programs, prefill=prefill))
    found = generate(engine, requests)
    # Each member's first decode step reads the last token of the prompt.
    last = np.concatenate(read)
    assert sorted(last[last > 0]) == sorted(len(prompt) - 1 for prompt in prompts)
    assert len({c.tokens.tobytes() for c in found}) == len(found)
    check_tokens(found)


@pytest.mark.parametrize(
    ("fsdp", "tp"),
    [
        (1, 1),
        (2, 2),
        pytest.param(8, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
def test_eight_devices_sample_the_same_as_one(sampled: list[Completion], fsdp: int, tp: int):
    engine = tiny.engine(plan=EIGHT | {"fsdp": fsdp, "tp": tp})
    found = generate(engine, adapter=tiny.probe(devices=8, fsdp=fsdp, tp=tp))
    assert count_ties(sampled, found) == 0


def test_no_device_waits_for_another_while_decoding():
    """Each device has a whole base and slots of its own."""
    engine = tiny.engine(plan=EIGHT)
    programs = engine._programs
    for program in (*programs.segment.values(), *programs.fill.values()):
        text = program.as_text()
        assert text is not None
        collective = r" (?:all-|collective-|reduce-scatter).*replica_groups="
        groups = re.findall(collective + r"(\{\{.*?\}\}|mesh.*?\})", text)
        # With an unsharded vocabulary, each device's collectives involve only itself. Newer
        # versions of XLA name the axes of the mesh, of which those of size 1 do.
        alone = "{" + ",".join(f"{{{n}}}" for n in range(8)) + "}"
        axes = ("{'fsdp'}", "{'tp'}", "{'fsdp','tp'}")
        assert set(groups) <= {alone, *(f"mesh['data'=8,'fsdp'=1,'tp'=1] {one}" for one in axes)}
        assert len(groups) == text.count("replica_groups=")
        assert "collective-permute" not in text


def test_slots_are_donated_and_weights_are_not():
    programs = tiny.engine()._programs
    (segment,), (fill,) = programs.segment.values(), programs.fill.values()
    (prefill,) = programs.prefill.values()
    for program, donated in ((segment, 2), (fill, 0), (prefill, None)):
        arguments, _ = program.args_info
        for number, argument in enumerate(arguments):
            given = {leaf.donated for leaf in jax.tree.leaves(argument)}
            assert given == {number == donated}, number


def test_abort_ends_a_running_generation_and_every_later_one(
    sampled: list[Completion], monkeypatch: pytest.MonkeyPatch
):
    engine = tiny.engine()
    run, calls = engine._programs.segment[4], []

    def segment(*args: Any) -> Any:
        calls.append(args)
        engine.abort()
        return run(*args)

    watched: Any = {4: segment}
    monkeypatch.setattr(engine, "_programs", dataclasses.replace(engine._programs, segment=watched))
    with pytest.raises(Aborted):
        generate(engine)
    assert len(calls) == 1
    with pytest.raises(Aborted):
        generate(engine)
    monkeypatch.undo()
    engine.resume()
    same_bits(generate(engine, REQUESTS[:1]), sampled[:1])


LIMITS: dict[str, Any] = {"top_k": 12, "top_p": 0.8, "min_p": 0.1}


def left(scores: np.ndarray) -> np.ndarray:
    """Log-probs of one position renormalised after `LIMITS`, computed with a sort."""
    ranked = np.sort(scores)[::-1][: LIMITS["top_k"]]
    mass = np.cumsum(np.exp(ranked)) / np.exp(ranked).sum()
    last = ranked[np.flatnonzero(mass >= LIMITS["top_p"])[0]]
    kept = scores >= max(last, ranked[0] + np.log(LIMITS["min_p"]))
    return np.where(kept, scores - np.log(np.exp(scores[kept]).sum()), -np.inf)


def test_truncation_equals_a_sort_and_records_both_log_probs():
    completions = generate(tiny.engine(rollout=LIMITS))
    expected = recompute(completions)
    sizes, moved = set(), 0
    for completion, (logprobs, noisy) in zip(completions, expected, strict=True):
        assert completion.processed_logprobs is not None
        assert completion.processed_logprobs.dtype == np.float32
        kept = np.array([left(scores) for scores in logprobs])
        tokens = np.where(kept > -np.inf, noisy, -np.inf).argmax(axis=1)
        np.testing.assert_array_equal(completion.tokens, tokens)
        at = np.arange(len(tokens)), tokens
        np.testing.assert_allclose(completion.logprobs, logprobs[at], rtol=0, atol=1e-5)
        np.testing.assert_allclose(completion.processed_logprobs, kept[at], rtol=0, atol=1e-5)
        sizes |= set((kept > -np.inf).sum(axis=1).tolist())
        moved += int((tokens != noisy.argmax(axis=1)).sum())
    # Truncation changes the sampled tokens, and leaves sets of many sizes.
    assert moved > 20
    assert len(sizes) > 5
