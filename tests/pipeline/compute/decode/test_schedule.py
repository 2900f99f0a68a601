"""Slot scheduling: assignment order, and every request gets exactly one slot."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compute.decode.schedule import Slots
from pipeline.types import RolloutName, RolloutRequest


def requests(*sizes: int) -> list[RolloutRequest]:
    """A group of each size; prompt p has p + 1 tokens."""
    return [
        RolloutRequest(RolloutName("train", 0, prompt, sample), np.full(prompt + 1, prompt))
        for prompt, size in enumerate(sizes)
        for sample in range(size)
    ]


def prefill(slots: Slots[str], name: str, *, rows: int = 1, bucket: int = 100) -> list[list[int]]:
    """Prefills the next prompts; the sizes of the prefilled groups by device."""
    _, by_device = slots.next_prefill(lambda _: bucket, lambda _: rows)
    slots.add_prefilled(name, by_device)
    return [[len(group.members) for group in own] for own in by_device]


def test_each_prompt_goes_to_the_device_with_the_most_room():
    slots: Slots[str] = Slots.of(requests(1, 1, 1, 1, 5, 1, 1, 9), shards=2, slots=4)
    assert prefill(slots, "a", rows=2) == [[1, 1], [1, 1]]
    slots.assign()
    slots.release(np.array([True, True, False, False]))
    # More requests are left than there are slots, so prompts are prefilled ahead.
    assert prefill(slots, "b", rows=2) == [[5, 9], [1, 1]]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_every_request_is_sampled_once_and_no_slot_idles_while_requests_wait(
    sizes: list[int], shards: int, per_shard: int, rows: int, random: object
):
    all_requests = requests(*sizes)
    slots: Slots[str] = Slots.of(all_requests, shards=shards, slots=shards * per_shard)
    sampled: list[int] = []
    for number in range(10_000):
        while True:
            for _, assigned in slots.assign():
                for one in assigned:
                    assert slots.occupants[one.shard, one.slot] == one.member
            if not slots.needs_prefill():
                break
            prefill(slots, str(number), rows=rows)
        if not slots.busy.any():
            break
        for busy in slots.busy:
            # A free slot means that no request waits, on any device.
            assert busy.all() or slots.drained
        ended = np.array([random.random() < 0.4 for _ in range(slots.busy.size)])  # type: ignore[attr-defined]
        sampled += [index for _, index in slots.release(ended)]
    assert sorted(sampled) == list(range(len(all_requests)))
