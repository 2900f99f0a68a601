"""The assignment of requests to samplers depends on names and sizes, not on arrival order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
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
    """A sampler that answers after `first`, and then sets `then`."""

    def __init__(self, first: asyncio.Event | None = None) -> None:
        self.first, self.then = first, asyncio.Event()
        self.asked: list[tuple[int, int]] = []
        self.how: dict[str, Any] = {}

    async def generate(self, requests: Sequence[RolloutRequest], **how: Any) -> list[Completion]:
        self.asked, self.how = names(requests), how
        if self.first is not None:
            await self.first.wait()
        self.then.set()
        return [completion(one, str(one.name.prompt_id)) for one in requests]

    async def work(self) -> DecodeWork:
        return DecodeWork({4: 2}, slot_steps=8, tokens=len(self.asked), prompt_tokens=16)


def test_completions_keep_the_order_of_the_requests():
    async def run() -> tuple[list[Completion], DecodeWork]:
        other = BlockingSampler()
        one = BlockingSampler(other.then)
        order = [request(n) for n in (4, 0, 3, 1, 2)]
        found = await generate(cast("list[Sampler]", [one, other]), order, temperature=0.5)
        assert (one.asked, other.asked) == ([(0, 0), (2, 0), (4, 0)], [(1, 0), (3, 0)])
        assert one.how == other.how == {"temperature": 0.5, "min_finished": None}
        return found

    drawn, work = asyncio.run(run())
    assert work == DecodeWork({4: 4}, slot_steps=16, tokens=5, prompt_tokens=32)
    assert work.metrics == {
        "tokens/generated": 5,
        "rollout/slots_useful": 5 / 16,
        "rollout/prompt_positions": 32,
    }
    assert [done.name.prompt_id for done in drawn] == [4, 0, 3, 1, 2]
    assert [done.tokens[0] for done in drawn] == [ord(c) for c in "40312"]


@pytest.mark.parametrize(("cut_off", "finished"), [(0.5, [2, 2]), (0.01, [1, 1]), (0.99, [4, 3])])
def test_min_finished_is_the_share_of_each_samplers_requests_rounded_up(
    cut_off: float, finished: list[int]
):
    samplers = [BlockingSampler(), BlockingSampler()]
    requests = [request(n) for n in range(7)]
    work = generate(cast("list[Sampler]", samplers), requests, temperature=1.0, cut_off=cut_off)
    asyncio.run(work)
    # Of four and three requests.
    assert [one.how["min_finished"] for one in samplers] == finished


def test_a_sampler_without_requests_is_not_called():
    samplers = [BlockingSampler(), BlockingSampler()]
    asyncio.run(generate(cast("list[Sampler]", samplers), [request(1)], temperature=1.0))
    assert [bool(one.how) for one in samplers] == [True, False]
