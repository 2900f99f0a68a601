"""The assignment of requests to samplers depends on names and sizes, not on arrival order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocols import Sampler
from pipeline.rollout.dispatch import generate, shares
from pipeline.types import Completion, DecodeWork, RolloutName, RolloutRequest
from tests.samples import completion

TOKENS = np.array([2, 9], np.int32)


def request(prompt_id: int, sample: int = 0) -> RolloutRequest:
    return RolloutRequest(RolloutName("train", 0, prompt_id, sample), TOKENS)


def names(requests: Sequence[RolloutRequest]) -> list[tuple[int, int]]:
    return [(one.name.prompt_id, one.name.sample) for one in requests]


def test_groups_are_assigned_round_robin_in_the_order_of_their_names():
    requests = [request(prompt, sample) for prompt in (7, 3, 5) for sample in (1, 0)]
    first, second = shares(requests, samplers=2)
    assert names(first) == [(3, 0), (3, 1), (7, 0), (7, 1)]
    assert names(second) == [(5, 0), (5, 1)]


@given(st.permutations(range(9)), st.integers(1, 4))
def test_the_order_of_the_requests_does_not_matter(order: list[int], samplers: int):
    dealt = shares([request(n) for n in order], samplers=samplers)
    assert dealt == shares([request(n) for n in range(9)], samplers=samplers)
    assert sorted(name for share in dealt for name in names(share)) == [(n, 0) for n in range(9)]


class BlockingSampler:
    """A sampler that answers after another one has."""

    def __init__(self, first: asyncio.Event | None, then: asyncio.Event) -> None:
        self.first, self.then = first, then
        self.asked: list[tuple[int, int]] = []
        self.temperature = 0.0
        self.min_finished: int | None = None

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        self.asked, self.temperature, self.min_finished = names(requests), temperature, min_finished
        if self.first is not None:
            await self.first.wait()
        self.then.set()
        return [completion(one, str(one.name.prompt_id)) for one in requests]

    async def finished(self) -> list[Completion]:
        return []

    async def work(self) -> DecodeWork:
        return DecodeWork({4: 2}, slot_steps=8, tokens=len(self.asked), prompt_tokens=16)


def many(*samplers: BlockingSampler) -> list[Sampler]:
    return [cast("Sampler", sampler) for sampler in samplers]


def test_completions_keep_the_order_of_the_requests():
    async def run() -> tuple[list[Completion], DecodeWork, BlockingSampler, BlockingSampler]:
        late, early = asyncio.Event(), asyncio.Event()
        one, other = BlockingSampler(early, late), BlockingSampler(None, early)
        order = [request(n) for n in (4, 0, 3, 1, 2)]
        return *await generate(many(one, other), order, temperature=0.5), one, other

    drawn, work, one, other = asyncio.run(run())
    assert work == DecodeWork({4: 4}, slot_steps=16, tokens=5, prompt_tokens=32)
    assert work.metrics == {
        "tokens/generated": 5,
        "rollout/slots_useful": 5 / 16,
        "rollout/prompt_positions": 32,
    }
    assert [done.name.prompt_id for done in drawn] == [4, 0, 3, 1, 2]
    assert [done.tokens[0] for done in drawn] == [ord(c) for c in "40312"]
    assert one.asked == [(0, 0), (2, 0), (4, 0)]
    assert other.asked == [(1, 0), (3, 0)]
    assert one.temperature == other.temperature == 0.5


def test_min_finished_is_the_share_of_each_samplers_requests_rounded_up():
    async def run(cut_off: float | None) -> tuple[int | None, int | None]:
        then = asyncio.Event()
        one, other = BlockingSampler(None, then), BlockingSampler(None, then)
        requests = [request(n) for n in range(7)]
        await generate(many(one, other), requests, temperature=1.0, cut_off=cut_off)
        return one.min_finished, other.min_finished

    # Shares of four and three requests.
    assert asyncio.run(run(None)) == (None, None)
    assert asyncio.run(run(0.5)) == (2, 2)
    assert asyncio.run(run(0.01)) == (1, 1)
    assert asyncio.run(run(0.99)) == (4, 3)


def test_a_sampler_without_requests_is_not_called():
    async def run() -> BlockingSampler:
        idle = BlockingSampler(asyncio.Event(), asyncio.Event())
        await generate(
            many(BlockingSampler(None, asyncio.Event()), idle), [request(1)], temperature=1.0
        )
        return idle

    assert asyncio.run(run()).asked == []
