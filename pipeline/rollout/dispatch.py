"""Distributes rollout requests over samplers: a function of names, never of arrival order."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from itertools import groupby
from typing import Any

from configs.rollout import min_finished
from pipeline.protocols import Sampler
from pipeline.types import (
    Completion,
    DecodeWork,
    Report,
    RolloutRequest,
    ShowProgress,
)

REPORT_S = 0.1
"""Seconds between two questions to a sampler for the rollouts that have ended."""


def shares(requests: Sequence[RolloutRequest], *, samplers: int) -> list[list[RolloutRequest]]:
    """Assigns groups, in the order of their names, to the samplers in turn.

    A group stays together, because a sampler prefills its prompt once.
    """
    named = sorted(requests, key=lambda request: request.name)
    groups = groupby(named, key=lambda request: request.name.group)
    dealt: list[list[RolloutRequest]] = [[] for _ in range(samplers)]
    for number, (_, members) in enumerate(groups):
        dealt[number % samplers] += members
    return dealt


def counting(show: ShowProgress, total: int) -> Report:
    """A report that shows how many of `total` rollouts have ended."""
    ended = 0
    show(0, total)

    def report(completions: Sequence[Completion]) -> None:
        nonlocal ended
        ended += len(completions)
        show(ended, total)

    return report


async def _reporting(
    sampler: Sampler, work: Coroutine[Any, Any, list[Completion]], report: Report
) -> list[Completion]:
    """The result of `work`; meanwhile reports the rollouts that the sampler has finished."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=REPORT_S)
            if not task.done():
                report(await sampler.finished())
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return task.result()


async def generate(
    samplers: Sequence[Sampler],
    requests: Sequence[RolloutRequest],
    *,
    temperature: float,
    cut_off: float | None = None,
    report: Report | None = None,
) -> tuple[list[Completion], DecodeWork]:
    """Generates all requests on all samplers in parallel; completions in the order of requests.

    Args:
        samplers: at least one.
        requests: of any groups.
        temperature: 0 is greedy.
        cut_off: once this share of a sampler's requests has finished, it truncates the others;
            None: it finishes all.
        report: receives rollouts soon after they end.
    """

    async def one(sampler: Sampler, share: Sequence[RolloutRequest]) -> list[Completion]:
        ending = None if cut_off is None else min_finished(len(share), cut_off=cut_off)
        work = sampler.generate(share, temperature=temperature, min_finished=ending)
        completions = await (work if report is None else _reporting(sampler, work, report))
        total.add(await sampler.work())
        return completions

    total = DecodeWork()
    dealt = zip(samplers, shares(requests, samplers=len(samplers)), strict=True)
    tasks = [asyncio.create_task(one(sampler, share)) for sampler, share in dealt if share]
    try:
        generated = await asyncio.gather(*tasks)
    except BaseException:  # where one fails, the others end, too
        for task in tasks:
            task.cancel()
        raise
    by_name = {completion.name: completion for part in generated for completion in part}
    return [by_name[request.name] for request in requests], total
