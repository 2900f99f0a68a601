"""A rehearsal with fakes: its phases in order, its report, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from configs.schema import Config
from launch.rehearsal.expected import Target
from launch.rehearsal.phases import Rehearsal, Setup
from launch.rehearsal.report import Result, Row
from launch.rehearsal.scratch import rehearsal_config, temporary_run_folder
from pipeline.contracts.adapters import Restored
from pipeline.contracts.builds import Building, Built
from pipeline.contracts.clock import Clock
from pipeline.contracts.memory import MemoryUse, OutOfMemory
from pipeline.contracts.sizes import Sizes, WorkerPhase
from pipeline.inputs.hub.model_shape import read_model_shape
from pipeline.plan.cost_model.hardware import TOPOLOGIES
from pipeline.plan.search.fitting import first_sizes
from pipeline.plan.size_controller import SizeController
from pipeline.rollout.workers import Workers
from pipeline.run.run_folder import RunFolder
from rewards.base import RewardInput
from tests.fakes import (
    CharTokenizer,
    Disk,
    FakeLearner,
    FakeSampler,
    FakeScorer,
    Script,
    make_config,
    make_data,
)

ROW = 88
SHAPE = read_model_shape({"model_type": "gemma3_text", "vocab_size": 300, "num_hidden_layers": 7})
PLAN = {
    "platform": "cpu",
    "placement": "split",
    "slots": 4,
    "slot_buckets": [2],
    "prompt_buckets": [4],
    "micro_batch_tokens": 2 * ROW,
}
SFT: dict[str, Any] = {
    "run": {"phases": ["sft", "grpo"]},
    "sft": {"train": {"path": "demonstrations.jsonl"}, "steps": 1, "sequences_per_step": 2},
}
VALIDATED: dict[str, Any] = {
    "data": {"validation": {"path": "validation.jsonl"}},
    "eval": {"every_steps": 2},
}


@dataclass
class FakeProcess:
    """Reports the given memory, one peak after the other."""

    programs: Mapping[str, int] = field(default_factory=dict)
    peaks: list[int] = field(default_factory=list)

    async def memory(self) -> MemoryUse:
        peak = self.peaks.pop(0) if self.peaks else None
        return MemoryUse(self.programs, peak, None if peak is None else 1000)


class Rehearsing:
    """A rehearsal with fakes; `script` controls what happens."""

    def __init__(
        self,
        config: Config,
        *,
        processes: tuple[FakeProcess, ...] = (FakeProcess(),),
        target: Target | None = None,
    ) -> None:
        self.script, config = Script(), rehearsal_config(config)
        self.learner = FakeLearner(self.script, disk=Disk())
        self.sampler = FakeSampler(self.script, seed=0, number=0)
        self.scorer = FakeScorer(self.script, config)
        self.said: list[str] = []
        self.chosen: Sizes | None = None
        workers = Workers(
            samplers=[self.sampler],
            learner=self.learner,
            scorer=self.scorer,
            sizes=SizeController(config, first_sizes(config, None), self.said.append),
            config=config,
            clock=Clock(0.0),
            stop=self.script.stop,
        )
        self.setup = Setup(
            config=config,
            data=make_data(validation=3),
            tokenizer=CharTokenizer(),
            workers=workers,
            processes=processes,
            calibrate=self.calibrate,
            restore=self.restore,
            export=RunFolder.of(config).export,
            target=target,
        )

    async def calibrate(self) -> None:
        """Applies `chosen` sizes, if there are any."""
        self.script.note("calibrate")
        if self.chosen is not None:
            self.setup.workers.sizes.in_force = self.chosen

    async def restore(self) -> Restored:
        self.script.note("learner.restore")
        return await self.learner.restore()

    def run(self) -> Result:
        rehearsal = Rehearsal(self.setup, self.said.append, self.script.clock)

        async def both() -> Result:
            await rehearsal.start(waited_s=12.0)
            return await rehearsal.run()

        with temporary_run_folder(self.setup.config):
            return asyncio.run(both())


def plan(**changes: Any) -> dict[str, Any]:
    return {**PLAN, **changes}


def names(result: Result) -> list[str]:
    return [row.name for row in result.rows]


PHASES = [
    "start and load",
    "compile",
    "probe",
    "SFT update",
    "first sync",
    "prefill of 8",
    "prefill of 4",
    "decode",
    "decode in 2 slots",
    "rewards",
    "score",
    "update",
    "sync",
    "evaluation",
    "checkpoint",
    "restore",
    "export",
]


def test_every_phase_runs_once_in_a_runs_order(tmp_path: Path):
    one = Rehearsing(make_config(tmp_path, plan=PLAN, **SFT, **VALIDATED))
    result = one.run()
    assert result.failure is None
    assert names(result) == PHASES
    assert one.said[-15:] == [f"rehearsing: {name}" for name in PHASES[2:]]
    assert one.script.calls == [
        *("learner.publish probe", "sampler0.load -1", "sampler0.generate:probe 0"),
        *("learner.score probe", "learner.score"),
        *("learner.sft_update 0", "learner.publish 1", "sampler0.load 1"),
        *("sampler0.generate:rehearsal 8", "sampler0.generate:rehearsal 4"),
        *("sampler0.generate:rehearsal 0", "sampler0.generate:rehearsal 2"),
        *("scorer.score", "learner.score", "learner.update 1"),
        *("learner.publish 2", "sampler0.load 2", "sampler0.generate:test 0"),
        *("learner.save 2", "learner.keep_best 2"),
        *("learner.restore", "learner.publish 2", "sampler0.load 2", "learner.export 2"),
    ]
    # The update uses log-probs that the learner scored itself.
    assert len(one.learner.seen) == 5  # 4 of a step, and 1 in a small micro-batch
    assert all((rollout.completion.logprobs < 0).all() for rollout in one.learner.seen)
    assert not list(tmp_path.iterdir())


def test_open_sizes_are_calibrated_first_and_the_chosen_ones_rehearsed(
    tmp_path: Path,
):
    one = Rehearsing(make_config(tmp_path, plan=plan(fixed=False, slot_buckets=None)))
    one.chosen = Sizes(2, 2 * ROW)
    result = one.run()
    assert result.failure is None
    assert names(result)[2] == "calibration"
    assert one.script.calls[0] == "calibrate"
    # Chosen, not reduced by running out of memory.
    assert result.first == result.sizes == one.chosen
    assert "decode in 1 slots" in names(result)
    assert {sizes.slots for sizes in one.sampler.sizes} == {4, 2}


def test_phases_that_the_run_lacks_are_not_rehearsed(tmp_path: Path):
    one = Rehearsing(make_config(tmp_path, plan=plan(slot_buckets=[], prompt_buckets=[])))
    left = {"SFT update", "decode in 2 slots", "prefill of 4"}
    assert names(one.run()) == [name for name in PHASES if name not in left]
    assert "learner.keep_best 1" not in one.script.calls


def test_seconds_are_those_of_each_phase(tmp_path: Path):
    one = Rehearsing(make_config(tmp_path, plan=PLAN))
    one.script.durations = {"learner.update": 7.0, "sampler0.generate:test": 3.0}
    built = Building((Built("gradient 2", 5.0, cached=True), Built("score 2", 2.0, cached=False)))

    async def building() -> Building:
        return built

    one.learner.building = building  # type: ignore[method-assign]
    rows = {row.name: row for row in one.run().rows}
    assert rows["start and load"].seconds == 12.0
    assert (rows["compile"].seconds, rows["compile"].note) == (
        7.0,
        "2 programs, 1 from the cache; sum of their times",
    )
    assert (rows["update"].seconds, rows["evaluation"].seconds) == (7.0, 3.0)
    assert rows["sync"].seconds == 0.0


def test_bytes_are_those_of_the_fullest_process_and_program(tmp_path: Path):
    small = FakeProcess({"prefill 8": 10, "fill 8": 70, "segment 4": 30})
    large = FakeProcess({"prefill 8": 20, "gradient 2": 200, "gradient 1": 100, "score 2": 50})
    rows = Rehearsing(make_config(tmp_path, plan=PLAN), processes=(small, large)).run().rows
    found = {row.name: row.compiled_bytes for row in rows if row.compiled_bytes is not None}
    assert found == {"prefill of 8": 70, "decode": 30, "score": 50, "update": 200}
    assert {row.peak_bytes for row in rows} == {None}


def test_a_peak_belongs_to_the_phase_in_which_it_rose(tmp_path: Path):
    number = len(PHASES) - 1  # no SFT update
    one, other = FakeProcess(peaks=[5] * number), FakeProcess(peaks=[1] * 4 + [9] * number)
    result = Rehearsing(make_config(tmp_path, plan=PLAN), processes=(one, other)).run()
    assert [row.peak_bytes for row in result.rows] == [5] * 4 + [9] * (number - 4)
    assert [row.name for row in result.rows if row.is_peak] == ["start and load", "prefill of 8"]
    assert result.limit_bytes == 1000


def test_planned_figures_are_shown_beside_the_measured_ones(tmp_path: Path):
    config = make_config(tmp_path, plan=plan(platform="tpu"), **SFT)
    one = Rehearsing(config, target=Target(SHAPE, TOPOLOGIES["v5e-4"]))
    rows = {row.name: row for row in one.run().rows}
    unplanned = {"probe", "restore"}
    assert {name for name, row in rows.items() if row.planned is None} == unplanned
    sized = {"prefill of 8", "prefill of 4", "decode", "decode in 2 slots"}
    sized |= {"score", "SFT update", "update"}
    assert {name for name, row in rows.items() if row.planned_bytes is not None} == sized
    for row in rows.values():
        if row.planned is not None:
            assert 0 < row.planned.low <= row.planned.expected <= row.planned.high


CALLS: dict[str, tuple[str, WorkerPhase]] = {
    "sampler0.generate:rehearsal 8": ("prefill of 8", "generate"),
    "sampler0.generate:rehearsal 0": ("decode", "generate"),
    "learner.update 0": ("update", "update"),
    "learner.export 1": ("export", "export"),
}


def runs_out(phase: WorkerPhase) -> Callable[[], None]:
    def run_out() -> None:
        raise OutOfMemory(phase, "RESOURCE_EXHAUSTED: so many bytes")

    return run_out


@pytest.mark.parametrize("call", CALLS)
def test_out_of_memory_with_open_sizes_continues_with_a_message(tmp_path: Path, call: str):
    phase = CALLS[call][1]
    one = Rehearsing(make_config(tmp_path, plan=plan(fixed=False, slot_buckets=None)))
    one.script.on[call] = runs_out(phase)
    result = one.run()
    assert result.failure is None
    assert result.first == Sizes(4, 2 * ROW)
    fewer = Sizes(3, 2 * ROW) if phase == "generate" else Sizes(4, ROW)
    assert result.sizes == fewer
    assert one.script.calls.count(call) == 2
    assert any("out of memory while" in line for line in one.said)


@pytest.mark.parametrize("call", CALLS)
def test_out_of_memory_with_fixed_sizes_fails_and_names_the_smaller_ones(tmp_path: Path, call: str):
    name, phase = CALLS[call]
    one = Rehearsing(make_config(tmp_path, plan=PLAN))
    one.script.on[call] = runs_out(phase)
    result = one.run()
    assert result.failure is not None
    assert result.failure.name == name
    assert "RESOURCE_EXHAUSTED: so many bytes; plan.fixed = true" in result.failure.why
    fewer = "slots = 3" if phase == "generate" else f"micro_batch_tokens = {ROW}"
    assert f"--plan.fixed false continues with plan.{fewer}" in result.failure.why
    done = [phase for phase in PHASES if phase != "SFT update"]
    assert names(result) == done[: done.index(name)]


def test_a_reward_function_that_never_gives_a_value_fails(tmp_path: Path):
    one = Rehearsing(make_config(tmp_path, plan=PLAN))

    def broken(inputs: Sequence[RewardInput]) -> list[float]:
        raise KeyError(inputs[0].answer)

    one.scorer.functions["format"] = broken
    failure = one.run().failure
    assert failure is not None
    assert failure.name == "rewards"
    assert failure.why.startswith("rewards.functions format: no value for any of 4 completions: ")


def test_another_adapter_after_the_restore_fails(tmp_path: Path):
    one = Rehearsing(make_config(tmp_path, plan=PLAN))

    def lose() -> None:
        one.learner.adapter = "0" * 64

    one.script.on["learner.restore"] = lose
    failure = one.run().failure
    assert failure is not None
    assert failure.name == "restore"
    assert failure.why.startswith("restored another adapter than version 1")


def test_errors_at_the_start_are_mistakes_of_the_user(tmp_path: Path):
    one = Rehearsing(make_config(tmp_path, plan=PLAN))

    async def prepare(sizes: Sizes) -> NoReturn:
        raise ValueError("model.path: not these weights")

    one.sampler.prepare = prepare  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not these weights"):
        one.run()


def test_rows_are_values():
    assert Row("update", 1.0) == Row("update", 1.0)
