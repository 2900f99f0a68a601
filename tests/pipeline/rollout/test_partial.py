"""Rollouts that are trained on, continued or dropped: by hand, and for any cut-off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.rollout.partial import PartialSplit, continuations, split_partial
from pipeline.types import Completion, RolloutName, RolloutRequest
from tests.samples import completion


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
    first = split_partial(FIRST, (), mode="keep")
    assert names(first.finished) == [(0, 3, 0), (0, 3, 1)]
    assert names(first.partial) == [(0, 7, 0), (0, 7, 1)]
    assert (first.truncated, first.continued, first.dropped) == (1, 0, 0)
    assert first.tokens == 4 + 2 + 4 + 4
    (request,) = continuations(first.partial)
    assert request.name == FIRST[1].name
    assert request.partial is FIRST[1]
    np.testing.assert_array_equal(request.prefill_tokens, [2, 7, ord("a"), ord("b")])
    # It finishes in the next step, but a new group of the same prompt does not.
    rest = resumed(FIRST[1], drawn(0, 7, 1, "cd", version=1))
    second = split_partial([rest, drawn(1, 7, 0), cut(1, 7, 1)], first.partial, mode="keep")
    assert names(second.finished) == names([FIRST[0], rest])
    assert names(second.partial) == [(1, 7, 0), (1, 7, 1)]
    assert (second.truncated, second.continued, second.dropped) == (1, 1, 0)
    assert second.tokens == 3 + 4 + 2  # of the continued one the new ones
    assert second.metrics == {
        "rollout/truncated": 1.0,
        "rollout/continued": 1.0,
        "rollout/dropped": 0.0,
        "rollout/partial": 2.0,
    }


def test_truncated_rollouts_are_dropped_from_their_groups():
    found = split_partial(FIRST, (), mode="drop")
    assert names(found.finished) == [(0, 7, 0), (0, 3, 0), (0, 3, 1)]
    assert (found.partial, found.truncated, found.dropped) == ((), 1, 1)


def test_without_a_cut_off_all_rollouts_are_trained_on_in_order():
    whole = [drawn(0, prompt, sample) for prompt in (9, 2, 5) for sample in range(2)]
    expected = PartialSplit(whole, (), tokens=24, truncated=0, continued=0, dropped=0)
    for partial in ("off", "keep", "drop"):
        assert split_partial(whole, (), mode=partial) == expected


def test_versions_by_token():
    first = resumed(cut(0, 1, 0, "ab", version=4), cut(0, 1, 0, "c", version=6))
    one = resumed(first, drawn(0, 1, 0, "d", version=9))
    assert one.versions.tolist() == [4, 4, 6, 9, 9]
    assert one.versions.dtype == np.int32
    assert one.num_new == 2
    assert cut(0, 1, 0, "").versions.tolist() == []
