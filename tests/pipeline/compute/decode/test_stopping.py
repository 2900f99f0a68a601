"""Stop strings: the end of a rollout is independent of segments and of tokenization."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compute.decode.stopping import StopStrings
from pipeline.types import Completion
from tests import tiny
from tests.pipeline.compute.decode.reference import NEW, REQUESTS, generate
from tests.pipeline.compute.decode.test_engine import same_bits
from tests.samples import changed


def letters(tokens: np.ndarray) -> str:
    """Token n decodes to the n-th piece; the first has no text, some have several characters."""
    pieces = ("", "a", "b", "ab", "ba b", "<", "/", ">")
    return "".join(pieces[token] for token in tokens.tolist())


def check_by_segment(stops: StopStrings, tokens: list[int], *, segment: int) -> int | None:
    """Checks as the engine does: after each segment, until the rollout has ended."""
    for count in range(segment, len(tokens) + segment, segment):
        found = stops.end(np.array(tokens[:count], np.int32), new=segment)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        ([1, 2, 2, 1], 3),  # a b b
        ([1, 3, 2], 3),  # a ab b: starts inside a token
        ([1, 4, 2, 2], None),  # a "ba b" b: there is a space
        ([4, 4, 2], 2),  # completed inside a token, which is kept whole
        ([2, 2, 1], None),
        ([], None),
        ([1, 2, 2, 1, 2, 2], 3),  # two matches: the first counts
        ([5, 6, 7, 2], 3),  # the other string
        ([1, *[0] * 8, 2, 2], 11),  # as many tokens without text as the window allows
    ],
)
def test_the_token_that_completes_a_string_is_the_last(tokens: list[int], end: int | None):
    stops = StopStrings(("abb", "bba b", "</>"), letters)
    assert check_by_segment(stops, tokens, segment=1) == end
    assert check_by_segment(stops, tokens, segment=100) == end


@given(
    st.lists(st.integers(0, 7), max_size=60),
    st.lists(st.text("ab </>", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 70),
)
def test_promise_2_the_end_is_independent_of_the_segment_length(
    tokens: list[int], strings: list[str], segment: int
):
    stops = StopStrings(tuple(strings), letters)
    found = check_by_segment(stops, tokens, segment=1)
    assert check_by_segment(stops, tokens, segment=segment) == found
    if 0 not in tokens:
        texts = [letters(np.array(tokens[:end])) for end in range(1, len(tokens) + 1)]
        ends = [n for n, text in enumerate(texts, 1) if any(string in text for string in strings)]
        assert found == (ends[0] if ends else None)


@pytest.fixture(scope="module")
def sampled() -> list[Completion]:
    """Completions without stop strings."""
    return generate(tiny.engine())


def stop_strings(sampled: Sequence[Completion]) -> tuple[str, ...]:
    """Two and three tokens from the middle of rollouts, and the last ones of a rollout of NEW."""
    texts = [tiny.text_of(c.tokens) for c in sampled]
    longest = sorted(texts, key=len, reverse=True)
    (*_, full) = [tiny.text_of(c.tokens) for c in sampled if c.stop_reason == "length"]
    return longest[0][9:11], longest[1][14:17], full[-4:]


def stopped(sampled: Sequence[Completion], strings: Sequence[str]) -> list[Completion]:
    """The rollouts up to the token that completes a string, found in the whole text."""
    found = []
    for completion in sampled:
        # A stop token has no text, so a string is complete before it or never.
        texts = [tiny.text_of(completion.tokens[:n]) for n in range(len(completion.tokens) + 1)]
        ends = [n for n, text in enumerate(texts) if any(string in text for string in strings)]
        end = min(ends, default=None)
        short = changed(
            completion, tokens=completion.tokens[:end], logprobs=completion.logprobs[:end]
        )
        reason = "stop_string" if ends else completion.stop_reason
        found.append(dataclasses.replace(short, stop_reason=reason))
    return found


@pytest.mark.parametrize("plan", [{}, {"slot_buckets": (2, 1), "segment_steps": 3}])
def test_promise_2_stop_strings_end_rollouts_independently_of_the_plan(
    sampled: list[Completion], monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any]
):
    strings = stop_strings(sampled)
    expected = stopped(sampled, strings)
    by_text = [c for c in expected if c.stop_reason == "stop_string"]
    # One string is completed by the last token within the limit.
    assert {len(c.tokens) < NEW for c in by_text} == {True, False}
    assert {c.stop_reason for c in expected} == {"eos", "stop_string", "length"}
    # The programs are the same as without stop strings.
    engine = tiny.engine(plan=plan)
    monkeypatch.setattr(engine, "_stop_strings", StopStrings(strings, tiny.text_of))
    found = generate(engine)
    assert engine.work.tokens == sum(len(c.tokens) for c in expected)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=1e-5)
        assert one.stop_reason == two.stop_reason
    if not plan:
        # Four slots, four steps per segment: slots of stopped rollouts are reused.
        steps = 4 * sum(-(-len(c.tokens) // 4) for c in expected)
        assert engine.work.slot_steps < 1.2 * steps
        same_bits(found, expected)
        # The result is independent of the request order.
        same_bits(generate(engine, REQUESTS[::-1]), expected[::-1])


def test_a_stop_token_takes_precedence_over_a_stop_string_at_the_same_token(
    sampled: list[Completion], monkeypatch: pytest.MonkeyPatch
):
    ended = next(c for c in sampled if c.stop_reason == "eos" and len(c.tokens) > 6)
    (request,) = [one for one in REQUESTS if one.name == ended.name]

    def text_of(tokens: np.ndarray) -> str:
        """Decodes stop tokens to text, too."""
        return "".join(chr(32 + token) for token in tokens)

    engine, text = tiny.engine(), text_of(ended.tokens)
    for string, reason, size in (
        (text[-2:], "eos", len(text)),
        (text[-3:-1], "stop_string", len(text) - 1),
    ):
        monkeypatch.setattr(engine, "_stop_strings", StopStrings((string,), text_of))
        (found,) = generate(engine, [request])
        assert (found.stop_reason, len(found.tokens)) == (reason, size)
        np.testing.assert_array_equal(found.tokens, ended.tokens[:size])
        np.testing.assert_array_equal(found.logprobs, ended.logprobs[:size])
