"""Sizes chosen once more for the lengths of real rollouts: when, and what is written down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.balance import Balance
from pipeline.calibration import Beginning, Calibrated
from pipeline.datatypes import Completion, Rollout, RolloutName
from pipeline.plan.choice import choose_sizes
from pipeline.plan.speed import Speeds
from pipeline.records import Console, Records
from pipeline.revision import STEPS, Replayed, Revision
from pipeline.run_dir import RunFolder
from tests.fakes import FakeTracker
from tests.pipeline.calibrating import cache, config

__all__ = ["cache"]

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
    assert choice.sizes.rollout_rows == 64
    return Calibrated(beginning.case, beginning.ladder, speeds, choice)


@pytest.fixture
def balance(calibrated: Calibrated) -> Iterator[Balance]:
    made = calibrated.case.config
    folder = RunFolder.of(made)
    folder.create(made)
    balance = Balance(made, calibrated.choice.sizes, print)
    balance.record(Records(folder, FakeTracker(), Console(total=None, done=0)))
    balance.revise = Revision(balance, calibrated)
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
    assert balance.sizes.rollout_rows == 32
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
    left = balance.sizes = replace(balance.sizes, rollout_rows=slots)
    for _ in range(STEPS):
        balance.learned(rollouts(length))
    assert balance.sizes == left
    assert journaled(calibrated) == []


def test_less_than_what_a_lack_of_memory_has_left_may_be_chosen(
    balance: Balance, calibrated: Calibrated
):
    faster = {**SEGMENT_S, 32: 0.076, 16: 0.0155}
    known = replace(calibrated, speeds=replace(calibrated.speeds, segment_s=faster))
    balance.revise = Revision(balance, known)
    balance.sizes = replace(balance.sizes, rollout_rows=32)
    for _ in range(STEPS):
        balance.learned(rollouts(2))
    assert balance.sizes.rollout_rows == 16


@pytest.mark.parametrize("checkpoint", [0, STEPS - 1])
def test_a_run_that_goes_on_from_before_the_decision_takes_it_at_the_same_step(
    balance: Balance, calibrated: Calibrated, checkpoint: int
):
    for _ in range(STEPS + 1):
        balance.learned(rollouts(2))
    decided, folder = balance.sizes, RunFolder.of(calibrated.case.config)
    balance.step, balance.sizes = checkpoint, calibrated.choice.sizes
    balance.revise = Replayed.of(balance, folder)
    for _ in range(checkpoint, STEPS):
        assert balance.sizes == calibrated.choice.sizes
        balance.learned(rollouts(120))
    assert balance.sizes == decided != calibrated.choice.sizes
    first, second = journaled(calibrated)
    assert {**first, "time": 0} == {**second, "time": 0}


def test_what_the_checkpoint_has_is_not_decided_again(balance: Balance, calibrated: Calibrated):
    folder = RunFolder.of(calibrated.case.config)
    assert Replayed.of(balance, folder) is None
    for _ in range(STEPS):
        balance.learned(rollouts(2))
    assert Replayed.of(balance, folder) is None


def test_a_decision_is_not_taken_again_where_memory_has_left_less(
    balance: Balance, calibrated: Calibrated
):
    for _ in range(STEPS):
        balance.learned(rollouts(2))
    balance.step, left = 0, replace(calibrated.choice.sizes, rollout_rows=24)
    balance.revise, balance.sizes = Replayed.of(balance, RunFolder.of(balance.config)), left
    for _ in range(STEPS):
        balance.learned(rollouts(2))
    assert balance.sizes == left
