"""Slots by themselves: who gets which, in which order, and that nobody is lost or doubled."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compute.decode.schedule import Slots, groups
from pipeline.contracts.rollouts import RolloutName, RolloutRequest


def requests(*sizes: int) -> list[RolloutRequest]:
    """A group of each size; prompt p has p + 1 tokens."""
    return [
        RolloutRequest(RolloutName("train", 0, prompt, sample), np.full(prompt + 1, prompt))
        for prompt, size in enumerate(sizes)
        for sample in range(size)
    ]


def test_requests_with_the_same_prompt_are_a_group_wherever_they_stand():
    asked = requests(2, 1, 2)
    found = groups([asked[n] for n in (3, 0, 2, 4, 1)])
    assert [len(group.prompt_tokens) for group in found] == [3, 1, 2]
    assert [list(group.members) for group in found] == [[0, 3], [1, 4], [2]]


def read(slots: Slots[str], name: str, *, rows: int = 1, bucket: int = 100) -> list[list[int]]:
    """Reads the next prompts; how many members each device then has."""
    _, dealt = slots.next_prompts(lambda _: bucket, lambda _: rows)
    slots.wait(name, dealt)
    return [[len(group.members) for group in own] for own in dealt]


def test_a_prompt_is_read_once_and_its_group_goes_on_when_slots_are_free():
    slots: Slots[str] = Slots.of(requests(3, 2), shards=1, slots=2)
    assert slots.wants_prompts()
    assert read(slots, "first") == [[3]]
    ((prefilled, given_now),) = slots.give()
    assert (prefilled, [(one.slot, one.member) for one in given_now]) == ("first", [(0, 0), (1, 1)])
    # One member waits, so the next prompt can wait, too.
    assert not slots.wants_prompts()
    assert slots.give() == []
    assert slots.release(np.array([False, True])) == [(1, 1)]
    ((prefilled, given_now),) = slots.give()
    assert (prefilled, [(one.slot, one.member) for one in given_now]) == ("first", [(1, 2)])
    assert not slots.wants_prompts()
    assert slots.release(np.array([True, False])) == [(0, 0)]
    assert slots.wants_prompts()
    assert read(slots, "second") == [[2]]
    slots.give()
    assert not slots.drained
    slots.release(np.array([False, True]))
    slots.give()
    assert slots.drained


def test_each_prompt_goes_to_the_device_with_the_most_room():
    slots: Slots[str] = Slots.of(requests(1, 1, 1, 1, 5, 1, 1, 9), shards=2, slots=4)
    assert read(slots, "a", rows=2) == [[1, 1], [1, 1]]
    slots.give()
    slots.release(np.array([True, True, False, False]))
    # More is left than slots are there, so prompts are read ahead.
    assert read(slots, "b", rows=2) == [[5, 9], [1, 1]]


def test_at_the_end_nobody_waits_for_one_device_while_another_is_idle():
    slots: Slots[str] = Slots.of(requests(6, 1), shards=2, slots=8)
    # The second device reads the first one's prompt, too: two of that group find no slot there.
    assert read(slots, "a", rows=2) == [[6], [1, 6]]
    slots.give()
    assert slots.busy.sum(axis=1).tolist() == [4, 3]
    assert slots.drained


def test_a_device_reads_what_another_has_read_only_when_nothing_else_is_left():
    slots: Slots[str] = Slots.of(requests(64, 64, 1, 64), shards=2, slots=8)
    reads = [read(slots, "a")]
    slots.give()
    while not slots.drained:
        slots.release(np.array([True, False, False, False] * 2))
        slots.give()
        if slots.wants_prompts():
            reads.append(read(slots, "b"))
            slots.give()
    # Both devices keep what they have read while the group goes on: no prompt is read a third time.
    assert sum(len(own) for dealt in reads for own in dealt) <= 6


def test_a_group_for_which_there_is_room_is_read_once():
    slots: Slots[str] = Slots.of(requests(4, 3), shards=4, slots=16)
    assert read(slots, "a", rows=2) == [[4], [3], [], []]


def test_a_full_device_is_dealt_nothing_at_the_end():
    slots: Slots[str] = Slots.of(requests(2, 4, 2), shards=2, slots=8)
    assert read(slots, "a", rows=1) == [[2], [4]]
    slots.give()
    assert read(slots, "b", rows=4) == [[2], []]


def test_a_longer_prompt_ends_what_is_read_together():
    slots: Slots[str] = Slots.of(requests(1, 1, 1), shards=1, slots=8)
    bucket, dealt = slots.next_prompts(lambda size: 2 if size <= 2 else 4, lambda _: 8)
    assert bucket == 2
    assert [len(group.prompt_tokens) for group in dealt[0]] == [1, 2]


def test_compaction_keeps_the_order_and_needs_room():
    slots: Slots[str] = Slots.of(requests(4), shards=1, slots=4)
    read(slots, "a")
    slots.give()
    slots.release(np.array([True, False, False, True]))
    assert slots.compact(1) is None
    kept = slots.compact(2)
    assert kept is not None
    assert kept.tolist() == [[1, 2]]
    assert slots.holders.tolist() == [[1, 2]]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_everybody_is_drawn_once_and_no_slot_idles_while_someone_waits(
    sizes: list[int], shards: int, per_shard: int, rows: int, random: object
):
    asked = requests(*sizes)
    slots: Slots[str] = Slots.of(asked, shards=shards, slots=shards * per_shard)
    drawn: list[int] = []
    for number in range(10_000):
        while True:
            for _, given_now in slots.give():
                for one in given_now:
                    assert slots.holders[one.shard, one.slot] == one.member
            if not slots.wants_prompts():
                break
            read(slots, str(number), rows=rows)
        if not slots.busy.any():
            break
        for busy in slots.busy:
            # A free slot means that nobody waits, on any device.
            assert busy.all() or slots.drained
        ended = np.array([random.random() < 0.4 for _ in range(slots.busy.size)])  # type: ignore[attr-defined]
        drawn += [place for _, place in slots.release(ended)]
    assert sorted(drawn) == list(range(len(asked)))
