"""Sizes chosen once more for the lengths of real rollouts: when, and what is written down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contracts.builds import Building, Built, Ready
from pipeline.contracts.clock import Clock
from pipeline.contracts.rollouts import Completion, Rollout, RolloutName
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import Speeds
from pipeline.control.deadline import Deadline
from pipeline.control.reserve import EXPORT, Reserve
from pipeline.plan.balance import Balance, Worker
from pipeline.plan.calibration import Beginning, Calibrated
from pipeline.plan.revision import STEPS, Revision
from pipeline.plan.size_choice import choose_sizes
from pipeline.run.records import Console, Records
from pipeline.run.run_folder import RunFolder
from tests.fakes import FakeTracker
from tests.pipeline.plan.calibrating import cache, config

__all__ = ["cache"]

LONG = Deadline(Clock(0.0), steps=1000, time_s=None)
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
    """Where segments of 64 slots are slow: not worth it for completions of one segment."""
    made = config(tmp_path, rollout__max_new_tokens=120, plan__row_tokens=192)
    beginning = Beginning.of(made, RunFolder.of(made))
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
def balance(calibrated: Calibrated) -> Iterator[Balance]:
    made = calibrated.case.config
    folder = RunFolder.of(made)
    folder.create(made)
    balance = Balance(made, calibrated.choice.sizes, print)
    balance.record(Records(folder, FakeTracker(), Console(total=None, done=0)))
    balance.revise = Revision(balance, calibrated, LONG)
    yield balance
    folder.close()


def journaled(calibrated: Calibrated) -> list[dict[str, object]]:
    return list(RunFolder.of(calibrated.case.config).events("replan"))


def test_lengths_as_expected_change_nothing(balance: Balance, calibrated: Calibrated):
    begun = balance.sizes
    for _ in range(2 * STEPS):
        balance.learned(rollouts(round(calibrated.case.lengths.completion)))
    assert balance.sizes == begun
    assert journaled(calibrated) == []
    assert balance.step == 2 * STEPS


def test_other_lengths_are_answered_once(balance: Balance, calibrated: Calibrated):
    begun = balance.sizes
    for step in range(STEPS):
        assert balance.sizes == begun, step
        balance.learned(rollouts(2))
    assert balance.sizes.slots == 32
    (entry,) = journaled(calibrated)
    assert (entry["step"], entry["reason"]) == (STEPS, "lengths")
    assert (entry["from"], entry["to"]) == (begun.to_json(), balance.sizes.to_json())
    assert entry["lengths"] == {"prompt": 26.0, "completion": 2.0}
    plan = RunFolder.of(calibrated.case.config).plan
    assert plan is not None
    assert plan["in_force"] == balance.sizes.to_json()
    for _ in range(STEPS):
        balance.learned(rollouts(120))
    assert len(journaled(calibrated)) == 1


@pytest.mark.parametrize(("slots", "length"), [(24, 2), (32, 120)])
def test_sizes_that_a_lack_of_memory_has_left_stay(
    balance: Balance, calibrated: Calibrated, slots: int, length: int
):
    """Those that were measured, too: more would be faster."""
    left = balance.sizes = replace(balance.sizes, slots=slots)
    for _ in range(STEPS):
        balance.learned(rollouts(length))
    assert balance.sizes == left
    assert journaled(calibrated) == []


def test_less_than_what_a_lack_of_memory_has_left_may_be_chosen(
    balance: Balance, calibrated: Calibrated
):
    faster = {**SEGMENT_S, 32: 0.076, 16: 0.0155}
    known = replace(calibrated, speeds=replace(calibrated.speeds, segment_s=faster))
    balance.revise = Revision(balance, known, LONG)
    balance.sizes = replace(balance.sizes, slots=32)
    for _ in range(STEPS):
        balance.learned(rollouts(2))
    assert balance.sizes.slots == 16


@pytest.mark.parametrize("checkpoint", [0, STEPS - 1])
def test_a_run_that_goes_on_from_before_the_decision_takes_it_at_the_same_step(
    balance: Balance, calibrated: Calibrated, checkpoint: int
):
    for _ in range(STEPS + 1):
        balance.learned(rollouts(2))
    decided, made = balance.sizes, calibrated.case.config
    assert balance.records is not None
    # Without a checkpoint it begins with what the first step had.
    again = Balance.of(made, balance.records.folder, say=print)
    assert again.sizes == calibrated.choice.sizes
    again.step = checkpoint
    again.record(balance.records)
    for _ in range(checkpoint, STEPS):
        assert again.sizes == calibrated.choice.sizes
        again.learned(rollouts(120))
    assert again.sizes == decided != calibrated.choice.sizes
    first, second = journaled(calibrated)
    assert second["again"]
    for name in ("step", "reason", "from", "to"):
        assert first[name] == second[name]


@pytest.mark.parametrize("by_steps", [True, False])
@pytest.mark.parametrize("left", [0.9, 1.1])
def test_what_preparing_takes_must_be_gained_in_the_steps_to_come(
    balance: Balance, calibrated: Calibrated, left: float, by_steps: bool
):
    for _ in range(STEPS):
        balance.learned(rollouts(2))
    (entry,) = journaled(calibrated)
    seconds: Any = entry["seconds"]
    steps = 40
    balance.prepared_s = steps * (seconds["from"] - seconds["to"])
    if by_steps:
        deadline = Deadline(Clock(0.0), steps=STEPS + round(left * steps), time_s=None)
    else:
        needed = left * steps * seconds["from"]
        kept = Reserve({EXPORT: 5.0})
        deadline = Deadline(Clock(0.0, now=lambda: 0.0), None, 5.0 + needed, reserve=kept)
        assert deadline.end_s == 5.0
    balance.step, balance.sizes = 0, calibrated.choice.sizes
    balance.revise = Revision(balance, calibrated, deadline)
    for _ in range(STEPS):
        balance.learned(rollouts(2))
    assert len(journaled(calibrated)) == 1 + (left > 1)


def test_what_preparing_takes_is_compiling_not_loading(tmp_path: Path, cache: None):
    made = config(tmp_path)

    class Loading:
        built: tuple[Built, ...] = ()

        async def prepare(self, _: Sizes) -> Ready:
            await asyncio.sleep(0.02)
            return Ready(0.02, self.built)

        async def building(self) -> Building:
            return Building(self.built)

    balance, process = Balance(made, Sizes(8, 512), print), Loading()
    asyncio.run(balance.start([Worker("process", process)]))
    assert balance.prepared_s == 0
    process.built = (Built("segment 8", 0.01, cached=True), Built("fill 8", 1e-3, cached=True))
    asyncio.run(balance.start([Worker("process", process)]))
    assert balance.prepared_s == pytest.approx(0.011)
    # Side by side.
    process.built = (Built("segment 8", 60.0, cached=False),)
    asyncio.run(balance.start([Worker("process", process)]))
    assert 0.02 <= balance.prepared_s < 60


def test_steps_of_worked_examples_are_not_looked_at(balance: Balance):
    begun = balance.sizes
    for _ in range(STEPS):
        balance.learned()
    for _ in range(STEPS - 1):
        balance.learned(rollouts(2))
    assert balance.sizes == begun
    balance.learned(rollouts(2))
    assert balance.sizes != begun
    assert balance.step == 2 * STEPS
