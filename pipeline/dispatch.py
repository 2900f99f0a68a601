"""Which sampler draws which rollouts: a function of names and sizes, never of arrival order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pipeline.datatypes import Completion, RolloutRequest
from pipeline.interfaces import Sampler


def shares(
    requests: Sequence[RolloutRequest], *, samplers: int, rows: int
) -> list[list[RolloutRequest]]:
    """Deals batches of `rows` requests, in the order of their names, to the samplers in turn."""
    named = sorted(requests, key=lambda request: request.name)
    dealt: list[list[RolloutRequest]] = [[] for _ in range(samplers)]
    for number, start in enumerate(range(0, len(named), rows)):
        dealt[number % samplers] += named[start : start + rows]
    return dealt


async def generate(
    samplers: Sequence[Sampler],
    requests: Sequence[RolloutRequest],
    *,
    rows: int,
    temperature: float,
) -> list[Completion]:
    """Draws all requests on all samplers at once; completions in the order of the requests."""
    dealt = shares(requests, samplers=len(samplers), rows=rows)
    drawn = await asyncio.gather(
        *(
            sampler.generate(share, temperature=temperature)
            for sampler, share in zip(samplers, dealt, strict=True)
            if share
        )
    )
    by_name = {completion.name: completion for part in drawn for completion in part}
    return [by_name[request.name] for request in requests]
