"""Sizes of a real colocated actor: they are chosen, and nothing else changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from actors.colocated_actor import ColocatedActor
from configs.schema import Config
from pipeline.compute.builds import Building, Ready
from pipeline.data.models.hf_config import read_model_shape
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.choose_sizes import choose_sizes
from pipeline.plan.sizes import Sizes
from pipeline.protocols import Learner, Sampler, SamplerTimes
from pipeline.run.cache_folder import CACHE_VARIABLE
from pipeline.run.console import Console
from tests import tiny
from tests.actors.two_layers import give_model


class InProcess:
    """An actor as a worker, without Ray."""

    def __init__(self, actor: ColocatedActor) -> None:
        self.actor = actor

    async def prepare(self, sizes: Sizes) -> Ready:
        return self.actor.prepare(sizes)

    async def building(self) -> Building:
        return self.actor.building()

    async def sampler_times(self) -> SamplerTimes:
        return self.actor.sampler_times()

    async def micro_batch_s(self) -> float:
        return self.actor.micro_batch_s()


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ColocatedActor:
    """An actor with an open model of two layers; nothing is compiled."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    plan: dict[str, Any] = {"slots": None, "slot_buckets": None, "micro_batch_tokens": None}
    actor = ColocatedActor(tiny.make_config(plan=plan))
    give_model(actor, monkeypatch)
    return actor


@pytest.mark.slow
def test_sizes_are_chosen_and_the_adapter_does_not_change(
    actor: ColocatedActor, monkeypatch: pytest.MonkeyPatch
):
    def shape_of(_: Config) -> ModelShape:
        return read_model_shape(tiny.hf_config(num_hidden_layers=2))

    monkeypatch.setattr("pipeline.plan.search.fitting.shape_of", shape_of)
    process = InProcess(actor)
    found = asyncio.run(
        choose_sizes(
            actor.requested,
            None,
            learner=cast("Learner", process),
            samplers=[cast("Sampler", process)],
            one_process=True,
            display=Console(write=lambda _: None),
        )
    )
    assert found.measured.keys() == {"slots", "micro_batch_tokens"}
    assert found.sizes == Sizes(actor.config.slots, actor.config.plan.micro_batch_tokens or 0)
    state = actor.learner.state
    assert (state.version, state.updates) == (0, 0)
    for name, value in jax.device_get(actor.learner.initial_adapter()).items():
        np.testing.assert_array_equal(value, state.adapter[name])
