"""Rollouts that are trained on, continued or dropped: by hand, and for any cut-off."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.progress import PartialRollouts
from pipeline.rollout.partial import PartialSplit, split_partial
from pipeline.types import Completion, RolloutName, RolloutRequest
from tests.samples import changed, completion


def drawn(step: int, prompt: int, sample: int, text: str = "abc", **changes: Any) -> Completion:
    name = RolloutName("train", step, prompt, sample)
    return completion(RolloutRequest(name, np.array([2, prompt], np.int32)), text, **changes)


def cut(step: int, prompt: int, sample: int, text: str = "ab", **changes: Any) -> Completion:
    changes = {"stop_reason": "truncated", **changes}
    return drawn(step, prompt, sample, text, ended=False, **changes)


def resumed(partial: Completion, new: Completion) -> Completion:
    """`new` after the segments of `partial`."""
    return replace(new, segments=(*partial.segments, *new.segments))


def names(completions: Any) -> list[tuple[int, int, int]]:
    found = [one.name for one in completions]
    return [(name.step, name.prompt_id, name.sample) for name in found]


FIRST = [drawn(0, 7, 0), cut(0, 7, 1), drawn(0, 3, 0), drawn(0, 3, 1)]


def test_a_group_is_kept_until_its_last_rollout_finishes():
    first = split_partial(FIRST, PartialRollouts(), mode="keep")
    assert names(first.finished) == [(0, 3, 0), (0, 3, 1)]
    assert names(first.partial.completions) == [(0, 7, 0), (0, 7, 1)]
    assert (first.truncated, first.continued, first.dropped) == (1, 0, 0)
    (request,) = first.partial.requests()
    assert request.name == FIRST[1].name
    assert request.partial is FIRST[1]
    np.testing.assert_array_equal(request.prefill_tokens, [2, 7, ord("a"), ord("b")])
    # It finishes in the next step, but a new group of the same prompt does not.
    rest = resumed(FIRST[1], drawn(0, 7, 1, "cd", version=1))
    second = split_partial([rest, drawn(1, 7, 0), cut(1, 7, 1)], first.partial, mode="keep")
    assert names(second.finished) == names([FIRST[0], rest])
    assert names(second.partial.completions) == [(1, 7, 0), (1, 7, 1)]
    assert (second.truncated, second.continued, second.dropped) == (1, 1, 0)
    assert second.metrics == {
        "rollout/truncated": 1.0,
        "rollout/continued": 1.0,
        "rollout/dropped": 0.0,
        "rollout/partial": 2.0,
    }


def test_tokens_are_counted_in_the_step_that_samples_them():
    # 4 + 2 + 4 + 4, then 5 - 2 of the continued one and 4 of a new one.
    first = split_partial(FIRST, PartialRollouts(), mode="keep")
    assert first.tokens == 14
    rest = resumed(FIRST[1], drawn(0, 7, 1, "cd", version=1))
    assert split_partial([rest, drawn(1, 5, 0)], first.partial, mode="keep").tokens == 3 + 4


def test_dropped_rollouts_are_removed_from_their_groups():
    settled = split_partial([*FIRST, cut(0, 9, 0), cut(0, 9, 1)], PartialRollouts(), mode="drop")
    assert names(settled.finished) == [(0, 7, 0), (0, 3, 0), (0, 3, 1)]
    assert (settled.truncated, settled.dropped, len(settled.partial)) == (3, 3, 0)
    assert settled.metrics["rollout/dropped"] == 3


def test_without_a_cut_off_all_rollouts_are_trained_on_in_order():
    whole = [drawn(0, prompt, sample) for prompt in (9, 2, 5) for sample in range(2)]
    expected = PartialSplit(
        whole, PartialRollouts(), tokens=24, truncated=0, continued=0, dropped=0
    )
    for partial in ("off", "keep", "drop"):
        assert split_partial(whole, PartialRollouts(), mode=partial) == expected


FLOATS = st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=5)


@given(FLOATS, st.booleans(), st.integers(0, 3))
def test_partial_rollouts_round_trip_through_json_bit_for_bit(
    values: list[float], truncated: bool, segments: int
):
    logprobs = np.array(values, np.float32)
    waits = cut(4, 11, 1, "x" * len(values), logprobs=logprobs, version=5)
    if truncated:
        waits = changed(waits, processed_logprobs=logprobs / np.float32(3))
    waits = replace(waits, segments=waits.segments * (segments + 1))
    waiting = PartialRollouts((drawn(4, 11, 0), waits, cut(4, 12, 0, "")))
    found = PartialRollouts.of_json(json.loads(json.dumps(waiting.to_json())))
    for one, two in zip(found.completions, waiting.completions, strict=True):
        assert (one.name, one.stop_reason) == (two.name, two.stop_reason)
        assert one.prompt_tokens.tobytes() == two.prompt_tokens.tobytes()
        for first, second in zip(one.segments, two.segments, strict=True):
            for key, value in vars(second).items():
                other = getattr(first, key)
                if isinstance(value, np.ndarray):
                    assert (other.dtype, other.tobytes()) == (value.dtype, value.tobytes())
                else:
                    assert other == value, key


@given(st.data(), st.sampled_from(["keep", "drop"]))
def test_every_rollout_is_trained_on_once_or_dropped(data: st.DataObject, partial: Any):
    waiting, learned, lost, asked = PartialRollouts(), [], 0, set()
    for step in range(4):
        requests = waiting.requests()
        new = [(step, prompt, sample) for prompt in (step % 2, 5) for sample in range(3)]
        asked |= set(new)
        again = [
            replace(request.partial, stop_reason=data.draw(st.sampled_from(["truncated", "eos"])))
            for request in requests
            if request.partial is not None
        ]
        fresh = [cut(*name) if data.draw(st.booleans()) else drawn(*name) for name in new]
        settled = split_partial([*again, *fresh], waiting, mode=partial)
        assert settled.continued == len(requests)
        # Oldest first, whole groups in sequence.
        order = names([*settled.finished]), names(settled.partial.completions)
        assert [sorted(part, key=lambda name: name[0]) for part in order] == list(order)
        assert all(one.stop_reason != "truncated" for one in settled.finished)
        learned += names(settled.finished)
        lost += settled.dropped
        waiting = settled.partial
    held = names(waiting.completions)
    assert len({*learned, *held}) == len(learned) + len(held) == len(asked) - lost
    if partial == "keep":
        assert lost == 0
        for name in learned:
            assert {(*name[:2], sample) for sample in range(3)} <= set(learned)


def test_versions_by_token():
    first = resumed(cut(0, 1, 0, "ab", version=4), cut(0, 1, 0, "c", version=6))
    one = resumed(first, drawn(0, 1, 0, "d", version=9))
    assert one.versions.tolist() == [4, 4, 6, 9, 9]
    assert one.versions.dtype == np.int32
    assert one.num_new == 2
    assert cut(0, 1, 0, "").versions.tolist() == []
