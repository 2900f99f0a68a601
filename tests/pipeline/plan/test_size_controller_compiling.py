"""Sizes that do not compile, and processes that follow the decisions of others."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.builds import Ready
from pipeline.contracts.memory import NothingSmaller, OutOfMemory
from pipeline.contracts.sizes import Sizes
from pipeline.plan.search.fitting import first_sizes
from pipeline.plan.size_controller import SizeController, Worker
from pipeline.run.records import Console, Records
from pipeline.run.run_folder import RunFolder
from tests.fakes import (
    FakeTracker,
)
from tests.pipeline.plan.sized_runs import (
    ROW,
    Compiling,
    config,
    hold,
    plan_of,
)


def journal(folder: RunFolder) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k != "time"} for entry in folder.entries()]


def test_reductions_at_the_start_are_journaled_later(tmp_path: Path):
    made, said = config(tmp_path), list[str]()
    folder = RunFolder.of(made)
    controller = SizeController(made, first_sizes(made, folder.plan), said.append)
    process = Compiling(most=4)
    worker = Worker("sampler 0", process)
    (ready,) = asyncio.run(controller.start([worker]))
    assert (process.asked, ready.load_s) == ([8, 6, 4], 2.0)
    assert (worker.sizes, controller.in_force) == (Sizes(4, 4 * ROW), Sizes(4, 4 * ROW))
    assert not folder.path.exists()
    folder.create(made)
    controller.record(Records(folder, FakeTracker(), Console(total=None, done=0)))
    folder.close()
    first, second, compiled = journal(folder)
    programs = {"segment 4": 1.5, "fill 4": 1.5}
    assert (first["event"], first["to"]["slots"], first["programs"]) == ("replan", 6, {})
    assert (second["reason"], second["to"]["slots"]) == ("segment 6 does not fit", 4)
    assert (second["programs"], second["program_seconds"], second["from_cache"]) == (
        programs,
        3.0,
        1,
    )
    assert compiled.pop("seconds") >= 0
    assert compiled == {
        "event": "compiled",
        "programs": {f"sampler 0: {name}": seconds for name, seconds in programs.items()},
        "program_seconds": 3.0,
        "from_cache": 1,
    }
    assert said[1:3] == [
        "sampler 0: segment 4: 1.5 s, 1 of 5 so far",
        "sampler 0: fill 4: 1.5 s from the cache, 2 of 5 so far",
    ]
    assert plan_of(folder)["in_force"] == Sizes(4, 4 * ROW).to_json()


def test_fixed_sizes_that_do_not_fit_fail_at_the_start(tmp_path: Path):
    made = config(tmp_path, fixed=True)
    controller = SizeController(made, first_sizes(made, None), print)
    process = Compiling(most=4)
    with pytest.raises(NothingSmaller, match="segment 8 does not fit"):
        asyncio.run(controller.start([Worker("sampler 0", process)]))
    assert process.asked == [8]


def test_other_processes_are_prepared_for_reduced_sizes_before_their_next_call(tmp_path: Path):
    made = config(tmp_path)
    controller = SizeController(made, first_sizes(made, None), print)
    one, other = (Worker(f"sampler {n}", Compiling(most=8)) for n in (0, 1))

    async def scenario() -> list[int]:
        await controller.start([one, other])
        full_once = [OutOfMemory("generate", "full")]

        async def work() -> int:
            if full_once:
                raise full_once.pop()
            return controller.in_force.slots

        return [await hold(controller, worker, work) for worker in (one, other)]

    assert asyncio.run(scenario()) == [6, 6]
    for worker in (one, other):
        assert isinstance(worker.process, Compiling)
        assert worker.process.asked == [8, 6]


def test_a_process_prepared_during_another_reduction_uses_the_sizes_in_force(
    tmp_path: Path,
):
    made = config(tmp_path)
    controller = SizeController(made, first_sizes(made, None), print)

    class WhileAnotherRunsOut(Compiling):
        async def prepare(self, sizes: Sizes) -> Ready:
            ready = await super().prepare(sizes)
            if sizes.slots == 6:
                controller.put_in_force(Sizes(4, sizes.micro_batch_tokens), "replan", "beside", {})
            return ready

    process = WhileAnotherRunsOut(most=8)
    worker = Worker("sampler 0", process)

    async def work() -> Sizes | None:
        return worker.sizes

    async def scenario() -> Sizes | None:
        await controller.start([worker])
        controller.put_in_force(Sizes(6, 4 * ROW), "replan", "before", {})
        return await hold(controller, worker, work)

    assert asyncio.run(scenario()) == Sizes(4, 4 * ROW) == controller.in_force
    assert process.asked == [8, 6, 4]


def test_simultaneous_out_of_memory_errors_cause_one_reduction(tmp_path: Path):
    made = config(tmp_path)
    said = list[str]()
    controller = SizeController(made, first_sizes(made, None), said.append)
    workers = [Worker(f"sampler {n}", Compiling(most=8)) for n in (0, 1)]

    async def scenario() -> list[int]:
        both, full_once = asyncio.Barrier(2), {0, 1}

        async def work(number: int) -> int:
            await both.wait()
            if number in full_once:
                full_once.remove(number)
                raise OutOfMemory("generate", "full")
            return controller.in_force.slots

        await controller.start(workers)
        return await asyncio.gather(
            *(hold(controller, worker, partial(work, n)) for n, worker in enumerate(workers))
        )

    assert asyncio.run(scenario()) == [6, 6]
    assert sum("out of memory" in line for line in said) == 1


def test_the_exceptions_round_trip_through_pickle():
    import pickle

    for error in (OutOfMemory("update", "full", 0.5), NothingSmaller("sync", "a sentence.")):
        copy = pickle.loads(pickle.dumps(error))  # written by this test
        assert (type(copy), copy.args, str(copy)) == (type(error), error.args, str(error))
        assert (copy.phase, copy.share) == (error.phase, error.share)
