"""Stop strings: where a rollout ends, whoever looks when, and in which pieces it was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compute.decode.stopping import StopStrings
from pipeline.contracts.rollouts import Completion
from pipeline.inputs.text.tokenizer import Tokenizer
from pipeline.inputs.text.tokenizer_files import read_tokenizer
from tests import tiny
from tests.demo_texts import write_tokenizer
from tests.pipeline.compute.decode.test_engine import same_bits
from tests.pipeline.compute.decode.written_out import NEW, REQUESTS, generate


def letters(tokens: np.ndarray) -> str:
    """Token n is the n-th of these; the first one is silent, some are long."""
    pieces = ("", "a", "b", "ab", "ba b", "<", "/", ">")
    return "".join(pieces[token] for token in tokens.tolist())


def looked(stops: StopStrings, tokens: list[int], *, segment: int) -> int | None:
    """As the engine looks: after each segment, until a rollout has ended."""
    for count in range(segment, len(tokens) + segment, segment):
        found = stops.end(np.array(tokens[:count], np.int32), new=segment)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        ([1, 2, 2, 1], 3),  # a b b
        ([1, 3, 2], 3),  # a ab b: begun in the middle of a token
        ([1, 4, 2, 2], None),  # a "ba b" b: there is a space
        ([4, 4, 2], 2),  # completed inside a token, which is kept whole
        ([2, 2, 1], None),
        ([], None),
        ([1, 2, 2, 1, 2, 2], 3),  # the first of two
        ([5, 6, 7, 2], 3),  # the other string
        ([1, *[0] * 8, 2, 2], 11),  # as many silent ones as the window has room for
    ],
)
def test_the_token_that_completes_a_string_is_the_last(tokens: list[int], end: int | None):
    stops = StopStrings(("abb", "bba b", "</>"), letters)
    assert looked(stops, tokens, segment=1) == end
    assert looked(stops, tokens, segment=100) == end


@given(
    st.lists(st.integers(0, 7), max_size=60),
    st.lists(st.text("ab </>", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 70),
)
def test_invariant_2_when_somebody_looks_changes_nothing(
    tokens: list[int], strings: list[str], segment: int
):
    stops = StopStrings(tuple(strings), letters)
    found = looked(stops, tokens, segment=1)
    assert looked(stops, tokens, segment=segment) == found
    if 0 not in tokens:
        texts = [letters(np.array(tokens[:end])) for end in range(1, len(tokens) + 1)]
        ends = [n for n, text in enumerate(texts, 1) if any(string in text for string in strings)]
        assert found == (ends[0] if ends else None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_a_character_of_several_tokens_is_complete_with_its_last(tokenizer: Tokenizer):
    snow = tokenizer.encode("tom ☃☃ é☃.").tolist()
    assert len(snow) >= 15  # bytes: the words have no pieces of their own
    stops = StopStrings(("é☃",), tokenizer.decode)
    end = looked(stops, snow, segment=4)
    assert end is not None
    assert tokenizer.decode(snow[:end]) == "tom ☃☃ é☃"
    assert tokenizer.decode(snow[: end - 1]).endswith("é\ufffd\ufffd")


def test_a_tag_in_one_piece_or_in_many_ends_the_same_text(tokenizer: Tokenizer):
    stops = StopStrings(("</answer>",), tokenizer.decode)
    whole = tokenizer.encode("<answer>7</answer> 8")
    parts = [tokenizer.encode(character) for character in "<answer>7</answer> 8"]
    for tokens in (whole, np.concatenate(parts)):
        end = looked(stops, tokens.tolist(), segment=3)
        assert tokenizer.decode(tokens[:end]) == "<answer>7</answer>"


@pytest.fixture(scope="module")
def drawn() -> list[Completion]:
    """Without stop strings."""
    return generate(tiny.engine())


def stop_strings(drawn: Sequence[Completion]) -> tuple[str, ...]:
    """Two and three tokens from within two of the rollouts, and the last of one that was cut."""
    texts = [tiny.text_of(c.tokens) for c in drawn]
    longest = sorted(texts, key=len, reverse=True)
    (*_, cut) = [tiny.text_of(c.tokens) for c in drawn if c.stop_reason == "length"]
    return longest[0][9:11], longest[1][14:17], cut[-4:]


def stopped(drawn: Sequence[Completion], strings: Sequence[str]) -> list[Completion]:
    """The same rollouts, each up to the token that completes a string, looked at as a whole."""
    found = []
    for completion in drawn:
        # A stop token has no text, so that a string is complete before it or not at all.
        texts = [tiny.text_of(completion.tokens[:n]) for n in range(len(completion.tokens) + 1)]
        ends = [n for n, text in enumerate(texts) if any(string in text for string in strings)]
        cut = dataclasses.replace(
            completion,
            tokens=completion.tokens[: min(ends, default=None)],
            logprobs=completion.logprobs[: min(ends, default=None)],
            stop_reason="stop_string" if ends else completion.stop_reason,
        )
        found.append(cut)
    return found


def test_a_stop_string_ends_a_rollout_with_the_token_that_completes_it(drawn: list[Completion]):
    strings = stop_strings(drawn)
    expected = stopped(drawn, strings)
    by_text = [c for c in expected if c.stop_reason == "stop_string"]
    # One string is completed by the last token that the rollout may have.
    assert {len(c.tokens) < NEW for c in by_text} == {True, False}
    assert {c.stop_reason for c in expected} == {"eos", "stop_string", "length"}
    engine = tiny.engine(rollout={"stop_strings": strings})
    found = generate(engine, REQUESTS)
    same_bits(found, expected)
    assert engine.work.tokens == sum(len(c.tokens) for c in expected)
    # Four slots at four steps: whoever was ended by the host made room for the next.
    steps = 4 * sum(-(-len(c.tokens) // 4) for c in expected)
    assert engine.work.slot_steps < 1.2 * steps
    # Which it did not in the slots' order.
    same_bits(generate(engine, REQUESTS[::-1]), expected[::-1])


@pytest.mark.parametrize(
    "plan",
    [
        {"slots": 8, "prompt_buckets": (6,), "segment_steps": 7},
        {"slot_buckets": (2, 1), "segment_steps": 3},
    ],
)
def test_invariant_2_stop_strings_end_alike_whenever_somebody_looks(
    drawn: list[Completion], plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    strings = stop_strings(drawn)
    # The programs are those without.
    engine = tiny.engine(plan=plan)
    monkeypatch.setattr(engine, "_stop_strings", StopStrings(strings, tiny.text_of))
    found = generate(engine)
    for one, two in zip(found, stopped(drawn, strings), strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=1e-5)
        assert one.stop_reason == two.stop_reason


def test_of_a_stop_token_and_a_stop_string_the_first_counts_and_of_both_at_once_the_token(
    drawn: list[Completion], monkeypatch: pytest.MonkeyPatch
):
    ended = next(c for c in drawn if c.stop_reason == "eos" and len(c.tokens) > 6)
    (request,) = [one for one in REQUESTS if one.name == ended.name]

    def text_of(tokens: np.ndarray) -> str:
        """Here stop tokens are text, too."""
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
