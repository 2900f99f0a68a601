"""Checkpoints are written while the run goes on, and count when they are complete."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.rollout import checkpoints
from tests.fakes import Disk, FakeLearner, Killed, Process, Script, kill, left_behind
from tests.samples import make_config
from tests.samples import make_data as fake_data

STEPS = 12


def settings(folder: Path, *, every: int = 3) -> Config:
    """Twelve steps: of five prompts, two a step, more than three epochs."""
    return make_config(
        folder,
        data={"validation": {"path": "validation.jsonl"}},
        eval={"every_steps": 4},
        budget={"steps": STEPS},
        checkpoint={"every_steps": every},
    )


def process(config: Config, disk: Disk, on: dict[str | int, Any] | None = None) -> Process:
    """A process whose checkpoints are complete only when they are waited for."""
    run = Process(config, disk=disk, script=Script(on=on or {}), data=fake_data(validation=3))
    run.learner.slow_saves = True
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = process(settings(tmp_path_factory.mktemp("whole")), Disk())
    run.run()
    return left_behind(run.folder)


def test_a_step_does_not_wait_for_a_checkpoint(tmp_path: Path):
    run = process(settings(tmp_path), Disk())
    seen: list[list[int]] = []
    run.script.on["learner.update 3"] = lambda: seen.append(
        [entry["step"] for entry in run.folder.events("checkpoint")]
    )
    run.run()
    # That of step 3 is still being written during step 4; that of step 0, the first, is measured.
    assert seen == [[0]]
    saved = [entry["step"] for entry in run.folder.events("checkpoint")]
    assert saved == sorted(saved)
    assert {0, 3, 6, 9, 12} <= set(saved)
    assert {"step", "wall_s", "waited_s", "seconds"} <= run.events("checkpoint")[-1].keys()


def test_a_finished_checkpoint_is_journaled_before_the_next_step(tmp_path: Path):
    run = process(settings(tmp_path), Disk())
    run.learner.slow_saves = False
    seen: list[int] = []
    run.script.on["learner.update 4"] = lambda: seen.extend(
        entry["step"] for entry in run.folder.events("checkpoint")
    )
    run.run()
    assert seen == [0, 3]


@pytest.mark.parametrize("step", range(STEPS))
def test_promise_3_a_run_killed_during_the_save_of_any_step_is_the_same_run(
    tmp_path: Path, undisturbed: dict[str, Any], step: int
):
    config, disk = settings(tmp_path, every=1), Disk()
    run = process(config, disk, {f"learner.update {step}": kill})
    with pytest.raises(Killed):
        run.run()
    assert len(run.learner.writing) == (step > 0)  # the checkpoint that nobody waits for
    before = max(disk, default=0)
    # A new best version is saved twice, and the second save waits for the first.
    assert before in ({step, step - 1} if step else {0})
    second = process(config, disk)
    assert second.progress.step == before
    second.run()
    assert left_behind(second.folder) == undisturbed


@pytest.mark.parametrize("step", range(STEPS))
def test_promise_3_a_run_stopped_at_any_step_is_the_same_run(
    tmp_path: Path, undisturbed: dict[str, Any], step: int
):
    config, disk = settings(tmp_path), Disk()
    run = process(config, disk)
    run.script.on[f"learner.update {step}"] = run.script.stop.set
    assert run.run() == "interrupted"
    assert (max(disk), run.learner.writing) == (step + 1, [])
    second = process(config, disk)
    assert second.progress.step == step + 1
    second.run()
    assert left_behind(second.folder) == undisturbed


def test_at_a_stop_signal_a_checkpoint_that_takes_too_long_is_abandoned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    undisturbed: dict[str, Any],
):
    monkeypatch.setattr(checkpoints, "STOP_S", 0.0)
    config, disk = settings(tmp_path), Disk()
    run = process(config, disk)

    async def never(self: FakeLearner, *, wait: bool) -> float | None:
        if self.version == 5 and wait:
            await asyncio.Event().wait()
        return await saved(self, wait=wait)

    saved = FakeLearner.saved
    monkeypatch.setattr(FakeLearner, "saved", never)
    run.script.on["learner.update 4"] = run.script.stop.set
    assert run.run() == "interrupted"
    (entry,) = run.events("checkpoint_abandoned")
    assert entry == {"step": 5, "last": 3}
    assert (
        "the checkpoint of step 5 is not complete after 0 s and is abandoned; that of step 3 stands"
        in capsys.readouterr().out
    )
    monkeypatch.undo()
    second = process(config, disk)
    assert second.progress.step == max(disk) == 3
    second.run()
    assert left_behind(second.folder) == undisturbed


def test_a_checkpoint_has_the_hashes_of_what_the_run_reads(tmp_path: Path):
    config, disk = settings(tmp_path), Disk()
    run = process(config, disk)
    run.folder.journal("started", code="0.1+ab", base="cd", data={"train": "ef"}, wandb_id=None)
    run.folder.journal("rewards", sha256={"correct": "01"})
    run.connect()
    run.run()
    assert disk[STEPS][1]["provenance"] == {
        "code": "0.1+ab",
        "base": "cd",
        "data": {"train": "ef"},
        "rewards": {"correct": "01"},
    }
