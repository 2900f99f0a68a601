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
from pipeline.contracts.rollouts import Completion, Rollout, RolloutName
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import Speeds
from pipeline.plan.calibration import CalibrationStart
from pipeline.plan.search.fitting import first_sizes
from pipeline.plan.size_choice import Calibrated, choose_sizes
from pipeline.plan.size_controller import RETUNE_STEPS, SizeController, Worker
from pipeline.run.records import Console, Records
from pipeline.run.run_folder import RunFolder
from tests.fakes import FakeTracker
from tests.pipeline.plan.calibration_runs import cache, config

__all__ = ["cache"]

LONG = RemainingTime(1000, float("inf"))
SEGMENT_S = {64: 0.076, 32: 0.035, 16: 0.03, 8: 0.03, 4: 0.03, 2: 0.03, 1: 0.03}


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
            "",
            {},
            1.0,
            1.0,
        )
        for number in range(64)
    ]


@pytest.fixture
def calibrated(tmp_path: Path, cache: None) -> Calibrated:
    """Segments of 64 slots are slow: not worth it for completions of one segment."""
    made = config(tmp_path, rollout__max_new_tokens=120, plan__row_tokens=192)
    beginning = CalibrationStart.of(made, None)
    assert beginning.case is not None
    assert beginning.ladder is not None
    micro_batch_s = {rows: 1e-6 * rows for rows in beginning.ladder.rows}
    speeds = Speeds("d", SEGMENT_S, {416: 0.0}, {64: 0.0}, micro_batch_s)
    lengths = beginning.case.lengths
    choice = choose_sizes(made, beginning.ladder, speeds, lengths)
    assert choice is not None
    assert choice.sizes.slots == 64
    return Calibrated(beginning.case, beginning.ladder, speeds, choice)


@pytest.fixture
def controller(calibrated: Calibrated) -> Iterator[SizeController]:
    made = calibrated.case.config
    folder = RunFolder.of(made)
    folder.create(made)
    controller = SizeController(made, calibrated.choice.sizes, print)
    controller.record(Records(folder, FakeTracker(), Console(total=None, done=0)))
    controller.use(calibrated)
    yield controller
    folder.close()


def journaled(calibrated: Calibrated) -> list[dict[str, object]]:
    return list(RunFolder.of(calibrated.case.config).events("replan"))


def test_expected_lengths_cause_no_retune(controller: SizeController, calibrated: Calibrated):
    begun = controller.in_force
    for _ in range(2 * RETUNE_STEPS):
        controller.step_done(rollouts(round(calibrated.case.lengths.completion)), LONG)
    assert controller.in_force == begun
    assert journaled(calibrated) == []
    assert controller.step == 2 * RETUNE_STEPS


def test_unexpected_lengths_cause_one_retune(controller: SizeController, calibrated: Calibrated):
    begun = controller.in_force
    for step in range(RETUNE_STEPS):
        assert controller.in_force == begun, step
        controller.step_done(rollouts(2), LONG)
    assert controller.in_force.slots == 32
    (entry,) = journaled(calibrated)
    assert (entry["step"], entry["reason"]) == (RETUNE_STEPS, "lengths")
    assert (entry["from"], entry["to"]) == (begun.to_json(), controller.in_force.to_json())
    assert entry["lengths"] == {"prompt": 26.0, "completion": 2.0}
    plan = RunFolder.of(calibrated.case.config).plan
    assert plan is not None
    assert plan["in_force"] == controller.in_force.to_json()
    for _ in range(RETUNE_STEPS):
        controller.step_done(rollouts(120), LONG)
    assert len(journaled(calibrated)) == 1


@pytest.mark.parametrize(("slots", "length"), [(24, 2), (32, 120)])
def test_retune_never_exceeds_sizes_reduced_by_out_of_memory(
    controller: SizeController, calibrated: Calibrated, slots: int, length: int
):
    """Also if larger ones were measured and would be faster."""
    left = replace(controller.in_force, slots=slots)
    controller.choose(left)
    for _ in range(RETUNE_STEPS):
        controller.step_done(rollouts(length), LONG)
    assert controller.in_force == left
    assert journaled(calibrated) == []


def test_retune_may_choose_smaller_sizes_than_out_of_memory_left(
    controller: SizeController, calibrated: Calibrated
):
    faster = {**SEGMENT_S, 32: 0.076, 16: 0.0155}
    known = replace(calibrated, speeds=replace(calibrated.speeds, segment_s=faster))
    controller.use(known)
    controller.choose(replace(controller.in_force, slots=32))
    for _ in range(RETUNE_STEPS):
        controller.step_done(rollouts(2), LONG)
    assert controller.in_force.slots == 16


@pytest.mark.parametrize("checkpoint", [0, RETUNE_STEPS - 1])
def test_a_resumed_run_repeats_the_retune_at_the_same_step(
    controller: SizeController, calibrated: Calibrated, checkpoint: int
):
    for _ in range(RETUNE_STEPS + 1):
        controller.step_done(rollouts(2), LONG)
    decided, made = controller.in_force, calibrated.case.config
    records = Records(RunFolder.of(made), FakeTracker(), Console(total=None, done=0))
    # Without a checkpoint it starts with the sizes of the first step.
    again = SizeController(made, first_sizes(made, records.folder.plan), print)
    assert again.in_force == calibrated.choice.sizes
    again.step = checkpoint
    again.record(records)
    for _ in range(checkpoint, RETUNE_STEPS):
        assert again.in_force == calibrated.choice.sizes
        again.step_done(rollouts(120), LONG)
    assert again.in_force == decided != calibrated.choice.sizes
    first, second = journaled(calibrated)
    assert second["again"]
    for name in ("step", "reason", "from", "to"):
        assert first[name] == second[name]


@pytest.mark.parametrize("by_steps", [True, False])
@pytest.mark.parametrize("left", [0.9, 1.1])
def test_retune_requires_that_the_remaining_steps_gain_the_compile_time(
    tmp_path: Path, controller: SizeController, calibrated: Calibrated, left: float, by_steps: bool
):
    for _ in range(RETUNE_STEPS):
        controller.step_done(rollouts(2), LONG)
    (entry,) = journaled(calibrated)
    seconds: Any = entry["seconds"]
    steps = 40
    if by_steps:
        remaining = RemainingTime(round(left * steps), float("inf"))
    else:
        remaining = RemainingTime(None, left * steps * seconds["from"])
    folder = RunFolder(tmp_path / "again")
    folder.create(calibrated.case.config)
    again = SizeController(calibrated.case.config, calibrated.choice.sizes, print)
    again.compile_s = steps * (seconds["from"] - seconds["to"])
    again.record(Records(folder, FakeTracker(), Console(total=None, done=0)))
    again.use(calibrated)
    for _ in range(RETUNE_STEPS):
        again.step_done(rollouts(2), remaining)
    assert len(list(folder.events("replan"))) == (left > 1)
    folder.close()


def test_compile_time_excludes_loading(tmp_path: Path, cache: None):
    made = config(tmp_path)

    class Loading:
        built: tuple[Built, ...] = ()

        async def prepare(self, _: Sizes) -> Ready:
            await asyncio.sleep(0.02)
            return Ready(0.02, self.built)

        async def building(self) -> Building:
            return Building(self.built)

    controller, process = SizeController(made, Sizes(8, 512), print), Loading()
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
    begun = controller.in_force
    for _ in range(RETUNE_STEPS):
        controller.step_done((), LONG)
    for _ in range(RETUNE_STEPS - 1):
        controller.step_done(rollouts(2), LONG)
    assert controller.in_force == begun
    controller.step_done(rollouts(2), LONG)
    assert controller.in_force != begun
    assert controller.step == 2 * RETUNE_STEPS
