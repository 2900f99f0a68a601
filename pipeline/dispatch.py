"""Which sampler draws which rollouts: a function of names, never of arrival order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from pipeline.datatypes import Completion, RolloutRequest
from pipeline.interfaces import Sampler


def shares(requests: Sequence[RolloutRequest], *, samplers: int) -> list[list[RolloutRequest]]:
    """Deals groups, in the order of their names, to the samplers in turn.

    A group stays together, because a sampler reads its prompt once.
    """
    named = sorted(requests, key=lambda request: request.name)
    groups = groupby(named, key=lambda request: replace(request.name, sample=0))
    dealt: list[list[RolloutRequest]] = [[] for _ in range(samplers)]
    for number, (_, members) in enumerate(groups):
        dealt[number % samplers] += members
    return dealt


async def generate(
    samplers: Sequence[Sampler],
    requests: Sequence[RolloutRequest],
    *,
    temperature: float,
) -> list[Completion]:
    """Draws all requests on all samplers at once; completions in the order of the requests."""
    dealt = shares(requests, samplers=len(samplers))
    drawn = await asyncio.gather(
        *(
            sampler.generate(share, temperature=temperature)
            for sampler, share in zip(samplers, dealt, strict=True)
            if share
        )
    )
    by_name = {completion.name: completion for part in drawn for completion in part}
    return [by_name[request.name] for request in requests]
