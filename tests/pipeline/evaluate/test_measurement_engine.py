"""An evaluation does not depend on batch size or padding."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from configs.schema import Config
from pipeline.evaluate.evaluation import requests
from pipeline.evaluate.measurement import answer
from pipeline.protocols import Sampler
from pipeline.types import Completion, DecodeWork, OpenedAdapter, Prompt, Published, RolloutRequest
from tests import tiny

TOLERANCE = 1e-5
PROMPTS = tuple(
    Prompt(number, "", one.prompt_tokens, "", {})
    for number, one in enumerate(tiny.make_requests([3, 14, 6, 9, 1, 12, 5]))
)


class EngineSampler:
    """The tiny engine under the tiny adapter."""

    def __init__(self, config: Config, **tables: dict[str, Any]) -> None:
        devices = config.plan.devices_per_sampler
        self.engine = tiny.engine(layers=2, **tables)
        self.adapter = tiny.probe(devices=devices, layers=2)

    async def open_adapter(self, path: str | None) -> OpenedAdapter:
        raise NotImplementedError

    async def load(self, published: Published) -> str:
        raise NotImplementedError

    async def finished(self) -> list[Completion]:
        return []

    async def work(self) -> DecodeWork:
        return self.engine.work

    async def resume(self) -> None:
        self.engine.resume()

    async def abort(self) -> None:
        raise NotImplementedError

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        assert min_finished is None
        return self.engine.generate(
            requests, adapter=self.adapter, version=0, adapter_sha256="", temperature=temperature
        )


def answers(
    *, samplers: int = 1, temperature: float, samples: int, **plan: Any
) -> list[Completion]:
    tables = {"plan": plan}
    config = tiny.make_config(**tables)
    return asyncio.run(
        answer(
            [cast("Sampler", EngineSampler(config, **tables)) for _ in range(samplers)],
            requests(PROMPTS, phase="test", samples=samples),
            at_once=config.slots,
            temperature=temperature,
            adapter=OpenedAdapter(0, "", ""),
        )
    )


@pytest.mark.parametrize(("temperature", "samples"), [(0.0, 1), (1.0, 3)])
def test_answers_do_not_depend_on_batch_size_padding_or_sampler(temperature: float, samples: int):
    expected = answers(temperature=temperature, samples=samples, slots=4)
    ties = 0
    for shape in (
        {"slots": 1},
        {"slots": 7, "prompt_buckets": [4, 9], "samplers": 2},
        {"slots": 8, "learner_devices": 2, "segment_steps": 5},
    ):
        found = answers(temperature=temperature, samples=samples, **shape)
        assert [one.name for one in found] == [one.name for one in expected]
        pairs = zip(found, expected, strict=True)
        ties += sum(not same(*pair, greedy=temperature == 0) for pair in pairs)
    assert ties <= 1


def same(one: Completion, other: Completion, *, greedy: bool) -> bool:
    """Whether the tokens are equal, or the first greedy tokens that differ are equally likely."""
    shared = min(len(one.tokens), len(other.tokens))
    differing = np.flatnonzero(one.tokens[:shared] != other.tokens[:shared])
    until = int(differing[0]) if differing.size else shared
    np.testing.assert_allclose(one.logprobs[:until], other.logprobs[:until], atol=TOLERANCE)
    if differing.size:
        assert not greedy or abs(one.logprobs[until] - other.logprobs[until]) < TOLERANCE
        return False
    assert len(one.tokens) == len(other.tokens)
    return True
