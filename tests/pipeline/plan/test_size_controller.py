"""Sizes that run out of memory: repeated calls, journaled decisions, and sizes after a resume."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.contracts.builds import Building, Built, Ready
from pipeline.contracts.memory import NothingSmaller, OutOfMemory
from pipeline.contracts.sizes import Sizes, WorkerPhase
from pipeline.plan.search.fitting import first_sizes, hardware_of
from pipeline.plan.size_controller import SizeController, Worker
from pipeline.run.console import Console
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from tests.fakes import Disk, FakeTracker, Killed, Process, left_behind, make_config, make_data

ROW = 88
WHOLE, FEWER_SLOTS, FEWER_ROWS = Sizes(8, 4 * ROW), Sizes(6, 4 * ROW), Sizes(8, 3 * ROW)


def config(folder: Path, *, fixed: bool = False, **tables: Any) -> Config:
    sizes = {"slots": 8, "micro_batch_tokens": 4 * ROW}
    common: dict[str, Any] = {
        "run": {"phases": ["sft", "grpo"]},
        "sft": {"train": {"path": "demonstrations.jsonl"}, "completion_column": "text", "steps": 1},
        "data": {"validation": {"path": "validation.jsonl"}},
        "eval": {"every_steps": 2},
        "budget": {"steps": 4},
    }
    plan = {"platform": "cpu", "placement": "split", "fixed": fixed, **sizes}
    return make_config(folder, plan=plan, **common | tables)


def process(config: Config, disk: Disk) -> Process:
    return Process(config, disk=disk, data=make_data(validation=3, sft=4))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Process:
    """A run with enough memory."""
    run = process(config(tmp_path_factory.mktemp("whole")), Disk())
    assert run.run() == "finished"
    assert run.events("replan") == []
    return run


def full(phase: WorkerPhase) -> Callable[[], None]:
    def run_out() -> None:
        raise OutOfMemory(phase, "RESOURCE_EXHAUSTED: so many bytes")

    return run_out


def controller(
    folder: Path, *, fixed: bool = False, show: Callable[[str], None] = print
) -> SizeController:
    """The controller of a run's first process, with the sizes of its configuration."""
    made = config(folder, fixed=fixed)
    return SizeController(made, first_sizes(made, None), Console(write=show))


def plan_of(folder: RunFolder) -> dict[str, Any]:
    found = folder.plan
    assert found is not None
    return found


def die() -> None:
    raise Killed


@dataclass
class Compiling:
    """A process that compiles programs; too many slots do not compile."""

    most: int
    asked: list[int] = field(default_factory=list)
    built: tuple[Built, ...] = ()

    async def prepare(self, sizes: Sizes) -> Ready:
        self.asked.append(sizes.slots)
        if sizes.slots > self.most:
            raise OutOfMemory("generate", f"segment {sizes.slots} does not fit")
        new = tuple(
            Built(f"{name} {sizes.slots}", 1.5, cached=name == "fill")
            for name in ("segment", "fill")
        )
        self.built += new
        return Ready(2.0, new)

    async def building(self) -> Building:
        return Building(self.built, 5)


CALLS: dict[str, tuple[WorkerPhase, int]] = {
    "sampler0.generate:probe 0": ("generate", 0),
    "learner.score probe": ("score", 0),
    "learner.publish 0": ("publish", 0),
    "sampler0.load 0": ("sync", 0),
    "sampler0.generate:test 0": ("generate", 0),
    "sampler0.generate:train 2": ("generate", 2),
    "sampler0.generate:validation 0": ("generate", 0),
    "learner.sft_update 0": ("update", 0),
    "learner.update 2": ("update", 2),
    "learner.publish 3": ("publish", 3),
    "sampler0.load 3": ("sync", 3),
    "learner.export 0": ("export", 4),  # the best version is the first one
}
"""Calls that need memory, with their phase and the number of steps trained before, in a run of four
steps, the first of them supervised."""


@pytest.mark.parametrize("call", CALLS)
def test_a_call_out_of_memory_is_repeated_and_nothing_else_changes(
    tmp_path: Path, whole: Process, call: str
):
    phase, step = CALLS[call]
    run = process(config(tmp_path), Disk())
    run.script.on[call] = full(phase)
    assert run.run() == "finished"
    assert run.learner.adapter == whole.learner.adapter
    assert left_behind(run.folder) == left_behind(whole.folder)
    # There is one more call, a repetition.
    at = run.script.calls.index(call)
    assert run.script.calls[at + 1] == call
    assert [*run.script.calls[:at], *run.script.calls[at + 1 :]] == whole.script.calls
    (entry,) = run.events("replan")
    after = FEWER_SLOTS if phase in {"generate", "sync"} else FEWER_ROWS
    assert entry == {
        "step": step,
        "phase": phase,
        "worker": "learner" if call.startswith("learner") else "sampler 0",
        "reason": "RESOURCE_EXHAUSTED: so many bytes",
        "hardware": hardware_of(run.config),
        "from": WHOLE.to_json(),
        "to": after.to_json(),
    }
    assert plan_of(run.folder)["in_force"] == after.to_json()
    used = run.learner if call.startswith("learner") else run.samplers[0]
    assert used.sizes == [WHOLE, after]


def test_sizes_are_reduced_until_a_call_fits(tmp_path: Path):
    made, used = controller(tmp_path), list[int]()

    async def work() -> None:
        used.append(made.in_force.slots)
        if made.in_force.slots > 3:
            raise OutOfMemory("generate", "full")

    asyncio.run(made.call(Worker("sampler", Compiling(most=8)), work))
    assert used == [8, 6, 4, 3]
    assert made.in_force == Sizes(3, 4 * ROW)


@pytest.mark.parametrize(
    ("call", "phase", "saved"),
    [
        ("sampler0.generate:train 3", "generate", {0, 2, 3}),
        ("learner.update 3", "update", {0, 2, 3}),
        # The learner has made a step that is not recorded.
        ("learner.publish 4", "publish", {0, 2}),
    ],
)
def test_out_of_memory_with_fixed_sizes_ends_the_run_with_a_checkpoint_and_a_message(
    tmp_path: Path, whole: Process, call: str, phase: WorkerPhase, saved: set[int]
):
    disk = Disk()
    first = process(config(tmp_path, fixed=True), disk)
    first.script.on[call] = full(phase)
    with pytest.raises(NothingSmaller) as told:
        first.run()
    assert set(disk) == saved
    learns = phase in {"update", "publish"}
    less = "plan.micro_batch_tokens = 264" if learns else "plan.slots = 6"
    assert "instead of" in str(told.value)
    for words in ("RESOURCE_EXHAUSTED: so many bytes", "--plan.fixed false", less):
        assert words in str(told.value)
    assert first.events("replan") == []
    # The remedy of the message: the same run with sizes that may change.
    second = process(config(tmp_path), disk)
    second.script.on["sampler0.generate:train 3"] = full("generate")
    assert second.run() == "finished"
    assert left_behind(second.folder) == left_behind(whole.folder)


def test_out_of_memory_with_the_smallest_sizes_ends_the_run(tmp_path: Path):
    made = config(tmp_path)
    small = made.model_copy(update={"plan": made.plan.model_copy(update={"slots": 1})})
    run = process(small, Disk())
    run.script.on["sampler0.generate:train 1"] = full("generate")
    with pytest.raises(NothingSmaller, match=r"nothing smaller than plan\.slots = 1"):
        run.run()
    assert 1 in run.disk


@pytest.mark.parametrize(
    ("phase", "fixed", "share"), [("generate", False, 0.0), ("update", True, -0.5)]
)
def test_the_message_says_so_if_no_size_fits(
    tmp_path: Path, phase: WorkerPhase, fixed: bool, share: float
):
    async def work() -> None:
        raise OutOfMemory(phase, "it needs 2 GiB beside 6 GiB that are in use", share)

    made = controller(tmp_path, fixed=fixed)
    with pytest.raises(NothingSmaller) as told:
        asyncio.run(made.call(Worker("colocated", Compiling(most=8)), work))
    assert str(told.value).endswith(
        "base, adapter and optimizer, which no size changes, leave no room: python -m launch.plan "
        "shows what would make some"
    )


@pytest.mark.parametrize(
    ("at", "killed", "begins", "prepared"),
    [
        # The checkpoint after step 2 has the reduced sizes.
        ("sampler0.generate:train 1", "learner.update 3", FEWER_SLOTS, [FEWER_SLOTS]),
        # Reduced after that checkpoint, at the same step: applied before anything is sampled.
        ("sampler0.generate:train 2", "learner.update 3", WHOLE, [FEWER_SLOTS]),
        # Later: repeated steps start with the original sizes and change at the same step.
        ("sampler0.generate:train 3", "learner.update 3", WHOLE, [WHOLE, FEWER_SLOTS]),
        # Without a checkpoint nothing is repeated.
        ("sampler0.generate:probe 0", "learner.publish 0", FEWER_SLOTS, [FEWER_SLOTS]),
    ],
)
def test_invariant_7_a_resume_has_the_sizes_that_the_run_had(
    tmp_path: Path, at: str, killed: str, begins: Sizes, prepared: list[Sizes]
):
    disk = Disk()
    first = process(config(tmp_path), disk)
    first.script.on = {at: full("generate"), killed: die}
    with pytest.raises(Killed):
        first.run()
    assert plan_of(first.folder)["in_force"] == FEWER_SLOTS.to_json()
    if killed == "learner.update 3":
        assert disk[2][1]["sizes"] == begins.to_json()
    second = process(config(tmp_path), disk)
    assert second.run() == "finished"
    assert second.samplers[0].sizes == second.learner.sizes == prepared
    entry, *again = second.events("replan")
    for other in again:
        assert other == {"again": True, **{name: entry[name] for name in other if name in entry}}
    assert len(again) == (begins == WHOLE)


def test_without_a_checkpoint_a_resume_starts_with_the_sizes_of_the_first_step(tmp_path: Path):
    """Each resume repeats the later decisions."""
    made = config(tmp_path, data={}, eval={}, checkpoint={"every_steps": 100})
    for number in range(3):
        disk = Disk()
        run = process(made, disk)
        run.script.on = {"learner.update 3": die}
        if not number:
            run.script.on["learner.update 2"] = full("update")
        with pytest.raises(Killed):
            run.run()
        assert not disk
        assert run.learner.sizes == [WHOLE, FEWER_ROWS]
    assert [entry["step"] for entry in run.events("replan")] == [2, 2, 2]


def test_alternating_decisions_are_repeated_once_per_resume(tmp_path: Path):
    made = config(tmp_path)
    folder = RunFolder.of(made)
    folder.create(made)
    for before, after in ((WHOLE, FEWER_SLOTS), (FEWER_SLOTS, WHOLE), (WHOLE, FEWER_SLOTS)):
        sizes = {"from": before.to_json(), "to": after.to_json()}
        folder.journal("replan", step=3, reason="any", **sizes)
    for number in range(1, 4):
        again = SizeController(made, WHOLE, Console(), step=3)
        again.record(Records(folder, FakeTracker(), Console()))
        assert again.in_force == FEWER_SLOTS
        assert len(list(folder.events("replan"))) == 3 + 3 * number
    folder.close()


def test_sizes_that_did_not_fit_a_process_are_not_tried_again(tmp_path: Path):
    made, disk = config(tmp_path), Disk()
    first = process(made, disk)
    first.script.on["learner.update 3"] = die
    with pytest.raises(Killed):
        first.run()
    second = SizeController(made, FEWER_ROWS, Console())
    worker = Worker("sampler", Compiling(most=6))
    asyncio.run(second.start([worker]))
    assert worker.sizes == Sizes(6, FEWER_ROWS.micro_batch_tokens)
    second.resume(disk[2][1])
    assert second.step == 2
    # The limit of slots does not affect micro-batches.
    assert second.in_force == FEWER_SLOTS


def test_with_fixed_sizes_earlier_decisions_are_not_repeated(tmp_path: Path):
    disk = Disk()
    first = process(config(tmp_path), disk)
    first.script.on = {"sampler0.generate:train 3": full("generate"), "learner.update 3": die}
    with pytest.raises(Killed):
        first.run()
    second = process(config(tmp_path, fixed=True), disk)
    assert second.run() == "finished"
    assert second.samplers[0].sizes == [WHOLE]


def test_sizes_of_the_checkpoint_precede_later_sizes_of_the_plan(tmp_path: Path):
    made = config(tmp_path)
    folder = RunFolder.of(made)
    folder.create(made)
    folder.write_plan({"in_force": FEWER_ROWS.to_json(), "at_checkpoint": FEWER_SLOTS.to_json()})
    again = SizeController(made, first_sizes(made, folder.plan), Console())
    assert again.in_force == FEWER_SLOTS
    # An older checkpoint was restored because the newest is damaged.
    again.resume({"step": 2, "sizes": WHOLE.to_json()})
    assert again.in_force == WHOLE
    folder.close()


def test_a_fixed_plan_ignores_sizes_in_the_run_folder(tmp_path: Path):
    fixed, disk = config(tmp_path, fixed=True), Disk()
    run = process(fixed, disk)
    assert run.run() == "finished"
    assert "sizes" not in disk[4][1]
    assert plan_of(run.folder) == {
        "fixed": True,
        "hardware": hardware_of(fixed),
        "in_force": WHOLE.to_json(),
        "at_checkpoint": WHOLE.to_json(),
    }
    run.folder.write_plan(plan_of(run.folder) | {"at_checkpoint": FEWER_ROWS.to_json()})
    assert SizeController(fixed, first_sizes(fixed, run.folder.plan), Console()).in_force == WHOLE


# --- preparing processes


def test_reductions_at_the_start_are_journaled_later(tmp_path: Path):
    said = list[str]()
    made = controller(tmp_path, show=said.append)
    process = Compiling(most=4)
    worker = Worker("sampler 0", process)
    (ready,) = asyncio.run(made.start([worker]))
    assert (process.asked, ready.load_s) == ([8, 6, 4], 2.0)
    assert worker.sizes == made.in_force == Sizes(4, 4 * ROW)
    folder = RunFolder.of(made.config)
    assert not folder.path.exists()
    folder.create(made.config)
    made.record(Records(folder, FakeTracker(), Console()))
    first, second, compiled = folder.entries()
    assert (first["event"], first["to"]["slots"]) == ("replan", 6)
    assert (second["reason"], second["to"]["slots"]) == ("segment 6 does not fit", 4)
    assert (compiled["event"], compiled["seconds"] >= 0) == ("compiled", True)
    programs = {"sampler 0: segment 4": 1.5, "sampler 0: fill 4": 1.5}
    assert (compiled["programs"], compiled["program_seconds"]) == (programs, 3.0)
    assert compiled["from_cache"] == 1
    assert said[2:4] == [
        "sampler 0: segment 4: 1.5 s, 1 of 5",
        "sampler 0: fill 4: 1.5 s from the cache, 2 of 5",
    ]
    assert plan_of(folder)["in_force"] == Sizes(4, 4 * ROW).to_json()
    # Programs of later sizes are journaled with the process that compiled them.
    made.in_force = Sizes(2, 4 * ROW)
    asyncio.run(made.prepare(worker))
    *_, later = folder.events("compiled")
    assert (later["worker"], list(later["programs"])) == ("sampler 0", ["segment 2", "fill 2"])
    folder.close()


def test_fixed_sizes_that_do_not_fit_fail_at_the_start(tmp_path: Path):
    process = Compiling(most=4)
    with pytest.raises(NothingSmaller, match="segment 8 does not fit"):
        asyncio.run(controller(tmp_path, fixed=True).start([Worker("sampler 0", process)]))
    assert process.asked == [8]


def test_other_processes_are_prepared_for_reduced_sizes_before_their_next_call(tmp_path: Path):
    made = controller(tmp_path)
    processes = [Compiling(most=8), Compiling(most=8)]
    workers = [Worker("sampler", process) for process in processes]
    full_once = [OutOfMemory("generate", "full")]

    async def work() -> int:
        if full_once:
            raise full_once.pop()
        return made.in_force.slots

    async def scenario() -> list[int]:
        await made.start(workers)
        return [await made.call(worker, work) for worker in workers]

    assert asyncio.run(scenario()) == [6, 6]
    assert [process.asked for process in processes] == [[8, 6], [8, 6]]


def test_a_process_prepared_during_another_reduction_uses_the_sizes_in_force(tmp_path: Path):
    made = controller(tmp_path)

    class WhileAnotherRunsOut(Compiling):
        async def prepare(self, sizes: Sizes) -> Ready:
            ready = await super().prepare(sizes)
            made.in_force = Sizes(4, sizes.micro_batch_tokens)
            return ready

    process = WhileAnotherRunsOut(most=8)
    worker = Worker("sampler 0", process)

    async def work() -> Sizes | None:
        return worker.sizes

    assert asyncio.run(made.call(worker, work)) == Sizes(4, 4 * ROW) == made.in_force
    assert process.asked == [8, 4]


def test_simultaneous_out_of_memory_errors_cause_one_reduction(tmp_path: Path):
    said = list[str]()
    made = controller(tmp_path, show=said.append)
    workers = [Worker(f"sampler {n}", Compiling(most=8)) for n in (0, 1)]

    async def scenario() -> list[int]:
        both, full_once = asyncio.Barrier(2), {0, 1}

        async def work(number: int) -> int:
            await both.wait()
            if number in full_once:
                full_once.remove(number)
                raise OutOfMemory("generate", "full")
            return made.in_force.slots

        return await asyncio.gather(
            *(made.call(worker, partial(work, n)) for n, worker in enumerate(workers))
        )

    assert asyncio.run(scenario()) == [6, 6]
    assert sum("out of memory" in line for line in said) == 1


def test_the_exceptions_round_trip_through_pickle():
    for error in (OutOfMemory("update", "full", 0.5), NothingSmaller("sync", "a sentence.")):
        copy = pickle.loads(pickle.dumps(error))  # written by this test
        assert (type(copy), copy.args, str(copy)) == (type(error), error.args, str(error))
        assert (copy.phase, copy.share) == (error.phase, error.share)
