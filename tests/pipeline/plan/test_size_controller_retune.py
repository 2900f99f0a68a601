"""Sizes chosen again for the lengths of real rollouts: conditions and records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contracts.builds import Building, Built, Ready
from pipeline.contracts.decisions import RemainingTime
from pipeline.contracts.rollouts import NO_TEXT, Completion, Rollout, RolloutName
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import Speeds
from pipeline.plan.search.fitting import PlanCase, first_sizes
from pipeline.plan.size_controller import RETUNE_STEPS, SizeController, Worker
from pipeline.run.console import Console
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from tests.fakes import FakeTracker
from tests.pipeline.plan.calibration_runs import ROW, config

LONG = RemainingTime(1000, float("inf"))
BEGUN = Sizes(64, ROW)
SEGMENT_S = {64: 0.076, 32: 0.035, 16: 0.03, 8: 0.03, 4: 0.03, 2: 0.03, 1: 0.03}
"""Segments of 64 slots are slow: not worth it for completions of one segment."""
SPEEDS = Speeds("d", SEGMENT_S, {416: 0.0}, {64: 0.0}, {1: 1e-6})


def rollouts(length: int) -> list[Rollout]:
    return [
        Rollout(
            Completion(
                name=RolloutName("train", 0, number, 0),
                prompt_tokens=np.zeros(26, np.int32),
                tokens=np.zeros(length, np.int32),
                logprobs=np.zeros(length, np.float32),
                stop_reason="eos",
                version=0,
                adapter_sha256="",
            ),
            NO_TEXT,
            {},
            1.0,
            1.0,
        )
        for number in range(64)
    ]


@pytest.fixture
def case(tmp_path: Path) -> PlanCase:
    return PlanCase.of(config(tmp_path, rollout__max_new_tokens=120, plan__row_tokens=ROW))


@pytest.fixture
def controller(case: PlanCase) -> Iterator[SizeController]:
    folder = RunFolder.of(case.config)
    folder.create(case.config)
    controller = SizeController(case.config, BEGUN, Console())
    controller.record(Records(folder, FakeTracker(), Console()))
    controller.use(case, SPEEDS)
    yield controller
    folder.close()


def train(controller: SizeController, length: int, *, steps: int = RETUNE_STEPS) -> None:
    for _ in range(steps):
        controller.step_done(rollouts(length), LONG)


def journaled(case: PlanCase) -> list[dict[str, Any]]:
    return list(RunFolder.of(case.config).events("replan"))


def test_expected_lengths_cause_no_retune(controller: SizeController, case: PlanCase):
    train(controller, round(case.lengths.completion), steps=2 * RETUNE_STEPS)
    assert controller.in_force == BEGUN
    assert journaled(case) == []
    assert controller.step == 2 * RETUNE_STEPS


def test_unexpected_lengths_cause_one_retune(controller: SizeController, case: PlanCase):
    train(controller, 2, steps=RETUNE_STEPS - 1)
    assert controller.in_force == BEGUN
    train(controller, 2, steps=1)
    assert controller.in_force.slots == 32
    (entry,) = journaled(case)
    assert (entry["step"], entry["reason"]) == (RETUNE_STEPS, "lengths")
    assert (entry["from"], entry["to"]) == (BEGUN.to_json(), controller.in_force.to_json())
    assert entry["lengths"] == {"prompt": 26.0, "completion": 2.0}
    plan = RunFolder.of(case.config).plan
    assert plan is not None
    assert plan["in_force"] == controller.in_force.to_json()
    train(controller, 120)
    assert len(journaled(case)) == 1


@pytest.mark.parametrize(("slots", "length"), [(24, 2), (32, 120)])
def test_retune_never_exceeds_sizes_reduced_by_out_of_memory(
    controller: SizeController, case: PlanCase, slots: int, length: int
):
    """Also if larger ones were measured and would be faster."""
    left = controller.in_force = replace(BEGUN, slots=slots)
    controller.room["slots"] = slots
    train(controller, length)
    assert controller.in_force == left
    assert journaled(case) == []


def test_retune_may_choose_smaller_sizes_than_out_of_memory_left(
    controller: SizeController, case: PlanCase
):
    faster = {**SEGMENT_S, 32: 0.076, 16: 0.0155}
    controller.use(case, replace(SPEEDS, segment_s=faster))
    controller.in_force = replace(BEGUN, slots=32)
    controller.room["slots"] = 32
    train(controller, 2)
    assert controller.in_force.slots == 16


@pytest.mark.parametrize("checkpoint", [0, RETUNE_STEPS - 1])
def test_a_resumed_run_repeats_the_retune_at_the_same_step(
    controller: SizeController, case: PlanCase, checkpoint: int
):
    train(controller, 2, steps=RETUNE_STEPS + 1)
    decided = controller.in_force
    records = Records(RunFolder.of(case.config), FakeTracker(), Console())
    # Without a checkpoint it starts with the sizes of the first step.
    again = SizeController(case.config, first_sizes(case.config, records.folder.plan), Console())
    assert again.in_force == BEGUN
    again.step = checkpoint
    again.record(records)
    for _ in range(checkpoint, RETUNE_STEPS):
        assert again.in_force == BEGUN
        train(again, 120, steps=1)
    assert again.in_force == decided != BEGUN
    first, second = journaled(case)
    assert second["again"]
    for name in ("step", "reason", "from", "to"):
        assert first[name] == second[name]


@pytest.mark.parametrize("by_steps", [True, False])
@pytest.mark.parametrize("left", [0.9, 1.1])
def test_retune_requires_that_the_remaining_steps_gain_the_compile_time(
    controller: SizeController, case: PlanCase, left: float, by_steps: bool
):
    train(controller, 2)
    (entry,) = journaled(case)
    seconds, steps = entry["seconds"], 40
    if by_steps:
        remaining = RemainingTime(round(left * steps), float("inf"))
    else:
        remaining = RemainingTime(None, left * steps * seconds["from"])
    again = SizeController(case.config, BEGUN, Console())
    again.compile_s = steps * (seconds["from"] - seconds["to"])
    again.use(case, SPEEDS)
    for _ in range(RETUNE_STEPS):
        again.step_done(rollouts(2), remaining)
    assert (again.in_force != BEGUN) == (left > 1)


def test_compile_time_excludes_loading(tmp_path: Path):
    made = config(tmp_path)

    class Loading:
        built: tuple[Built, ...] = ()

        async def prepare(self, _: Sizes) -> Ready:
            await asyncio.sleep(0.02)
            return Ready(0.02, self.built)

        async def building(self) -> Building:
            return Building(self.built)

    controller, process = SizeController(made, Sizes(8, 512), Console()), Loading()
    asyncio.run(controller.start([Worker("process", process)]))
    assert controller.compile_s == 0
    process.built = (Built("segment 8", 0.01, cached=True), Built("fill 8", 1e-3, cached=True))
    asyncio.run(controller.start([Worker("process", process)]))
    assert controller.compile_s == pytest.approx(0.011)
    # Compiled in parallel.
    process.built = (Built("segment 8", 60.0, cached=False),)
    asyncio.run(controller.start([Worker("process", process)]))
    assert 0.02 <= controller.compile_s < 60


def test_sft_steps_do_not_count_for_retune(controller: SizeController):
    for _ in range(RETUNE_STEPS):
        controller.step_done((), LONG)
    train(controller, 2, steps=RETUNE_STEPS - 1)
    assert controller.in_force == BEGUN
    train(controller, 2, steps=1)
    assert controller.in_force != BEGUN
    assert controller.step == 2 * RETUNE_STEPS
