"""Calibration of a real colocated actor: sizes are found, and nothing else changes."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from pipeline.plan.calibration import CalibrationStart, calibrate
from pipeline.plan.size_choice import StepTimes
from pipeline.plan.size_controller import SizeController, Worker

import configs
from actors.colocated_actor import ColocatedActor
from configs.load import load_config
from pipeline.compute.device_memory import GIB, resident_bytes
from pipeline.compute.opening import OpenedModel
from pipeline.contracts.builds import Building, Ready
from pipeline.contracts.cache_folder import CACHE_VARIABLE
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import Lengths, Speeds
from pipeline.inputs.hub.model_shape import shape_of
from pipeline.inputs.text.tokenizer_files import read_tokenizer
from pipeline.plan.cost_model.hardware import topology_of
from pipeline.plan.search.fitting import PlanCase, with_plan
from pipeline.run.console import Console
from tests import tiny

DEMO = Path(__file__).parents[2] / "launch" / "demo" / "tiny_gemma3"
ROW = 42


class InProcess:
    """The actor without Ray, which lacks one byte for a micro-batch of two rows."""

    def __init__(self, actor: ColocatedActor) -> None:
        self.actor = actor
        self.limit: float | None = None

    async def prepare(self, sizes: Sizes) -> Ready:
        return self.actor.prepare(sizes)

    async def building(self) -> Building:
        return self.actor.building()

    async def sampler_speed(self) -> Speeds:
        return self.actor.sampler_speed()

    async def learner_speed(self) -> Speeds:
        actor = self.actor
        if self.limit is None:
            gc.collect()  # arrays of other tests do not count
            needs = max(actor.learner.needs.values())
            self.limit = (resident_bytes() + needs - 1) / GIB
        actor.config = with_plan(actor.config, {"hbm_gib": self.limit})
        return actor.learner_speed()


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ColocatedActor:
    """An actor with an open model of two layers; nothing is compiled."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("actors.model_actor.find_model", lambda _: DEMO)
    monkeypatch.setattr("actors.model_actor.open_tokenizer", lambda _: SimpleNamespace(path=DEMO))
    plan: dict[str, Any] = {"fixed": False, "slots": 4, "slot_buckets": None}
    made = tiny.make_config(plan=plan | {"micro_batch_tokens": 2 * ROW})
    actor = ColocatedActor(made)
    policy, base = tiny.policy(layers=2), tiny.base(layers=2)
    opened = OpenedModel(policy, base, tiny.VOCABULARY, read_tokenizer(DEMO), 0.0)
    actor.opening = opened  # type: ignore[assignment]
    return actor


def assert_counted(actor: ColocatedActor) -> None:
    """The total that was known before compilation is the number of compiled programs."""
    building = actor.building()
    assert len(building.done) - building.earlier == building.total


@pytest.mark.slow
def test_calibration_finds_sizes_that_fit_and_leaves_the_adapter_unchanged(actor: ColocatedActor):
    demo = load_config(Path(configs.__file__).parent / "demo.toml", [])
    topology, lengths = topology_of(actor.config, None), Lengths.expected(actor.config)
    case = PlanCase(actor.config, shape_of(demo), topology, lengths)
    process, beginning = InProcess(actor), CalibrationStart(Sizes(4, 2 * ROW), case)
    controller = SizeController(actor.config, beginning.sizes, Console())
    worker = Worker("sampler and learner", process)

    async def start() -> tuple[Any, StepTimes | None]:
        await controller.start([worker])
        assert_counted(actor)
        before = jax.device_get(actor.learner.state.adapter)
        found = await calibrate(
            controller, beginning, sampler=(worker, process), learner=(worker, process)
        )
        return before, found

    before, found = asyncio.run(start())
    assert found is not None
    assert found.best == controller.in_force
    assert found.slots.keys() >= {4, 2, 1}
    assert found.micro_batch_tokens.keys() == {ROW}
    assert controller.room == {"micro_batch_tokens": ROW}
    after = jax.device_get(actor.learner.state.adapter)
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])
    # Later work uses the sizes that were found.
    actor.prepare(controller.in_force)
    assert_counted(actor)
    (version, sha256), payload = actor.publish(which="current")
    assert actor.load(version, sha256, payload) == sha256
    completions = actor.generate(tiny.make_requests([3, 14, 6]), temperature=1.0)
    assert [len(one.prompt_tokens) for one in completions] == [3, 14, 6]
    assert max(actor.work().segments) == controller.in_force.slots
