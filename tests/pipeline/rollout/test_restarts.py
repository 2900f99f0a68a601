"""Dead processes are restarted and their calls repeated; processes that hang are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.faults import Faults
from pipeline.contracts.phases import Heartbeat, PhaseClock
from pipeline.contracts.restarts import RestartBudget
from pipeline.contracts.rollouts import Completion, RolloutRequest
from pipeline.contracts.workers import WorkerDied
from pipeline.rollout.restarts import Heartbeats, RestartingWorker, Restarts, TrainingStopped
from tests.fakes import (
    Disk,
    FakeClock,
    Process,
    Script,
    left_behind,
    make_config,
    make_data,
)
from tests.simulation import VirtualLoop

STEPS: dict[str, Any] = {
    "budget": {"steps": 3},
    "eval": {"every_steps": 2},
    "data": {"validation": {"path": "validation.jsonl"}},
}


def dies() -> None:
    raise WorkerDied("sampler 0", "its process ended unexpectedly")


def process(folder: Path, script: Script | None = None, **tables: Any) -> Process:
    config = make_config(folder, **{**STEPS, **tables})
    return Process(config, disk=Disk(), data=make_data(validation=4), script=script)


def run(one: Process) -> str:
    """Runs in simulated time, in which pauses take none."""
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(one.coordinator.run())
    finally:
        one.folder.close()


@pytest.mark.slow
def test_a_death_in_any_call_of_a_sampler_or_the_rewards_changes_nothing(tmp_path: Path):
    whole = process(tmp_path / "whole")
    assert run(whole) == "finished"
    calls = whole.script.calls
    mortal = [n for n, call in enumerate(calls) if call.startswith(("sampler", "scorer"))]
    assert {calls[n].split(":")[0].split()[0] for n in mortal} == {
        "sampler0.load", "sampler0.generate", "scorer.score"
    }  # fmt: skip
    for number in mortal:
        one = process(tmp_path / str(number), Script(on={number: dies}))
        assert run(one) == "finished", calls[number]
        assert left_behind(one.folder) == left_behind(whole.folder), calls[number]
        assert one.learner.adapter == whole.learner.adapter
        (entry,) = one.events("restarted")
        assert entry["worker"] == "sampler 0"
        assert one.folder.summary is not None
        assert one.folder.summary["faults"]["restarts"] == 1


def test_a_sampler_that_keeps_dying_ends_the_run_with_a_checkpoint(tmp_path: Path):
    one = process(tmp_path, faults={"restarts": 2})
    generate, started = one.samplers[0].generate, 2

    async def deadly(requests: Sequence[RolloutRequest], **settings: Any) -> list[Completion]:
        if requests[-1].name.phase == "train" and requests[-1].name.step == started:
            dies()
        return await generate(requests, **settings)

    one.samplers[0].generate = deadly  # type: ignore[method-assign]
    why = "^sampler 0: its process ended unexpectedly again, after 2 restarts without"
    with pytest.raises(TrainingStopped, match=why):
        run(one)
    assert [entry["pause_s"] for entry in one.events("restarted")] == [1.0, 4.0]
    assert max(one.disk) == 2


def test_a_dead_learner_ends_the_coordinator(tmp_path: Path):
    one = process(tmp_path, Script(on={"learner.update 1": dies}))
    with pytest.raises(WorkerDied):
        run(one)
    assert one.events("restarted") == []


class Mortal:
    """A worker whose calls die until it was restarted."""

    def __init__(self) -> None:
        self.alive, self.restarts, self.renewed = False, 0, 0

    async def score(self, text: str) -> str:
        await asyncio.sleep(1.0)
        if not self.alive:
            dies()
        return text

    async def restart(self) -> None:
        await asyncio.sleep(1.0)
        self.alive, self.restarts = True, self.restarts + 1

    async def renew(self) -> None:
        if not self.alive:
            dies()
        self.renewed += 1


def test_concurrent_calls_of_a_dead_process_restart_it_once():
    async def work() -> tuple[Mortal, list[str]]:
        target = Mortal()
        restarts = Restarts(Faults(), PhaseClock(), lambda *_, **__: None)
        worker = RestartingWorker(target, restarts=restarts, renew=target.renew)
        return target, list(await asyncio.gather(*(worker.score(text) for text in "abc")))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        target, found = runner.run(work())
    assert (found, target.restarts, target.renewed) == (["a", "b", "c"], 1, 1)


def test_an_abort_does_not_wait_for_a_restart():
    class Sampler(Mortal):
        aborted = 0

        async def restart(self) -> None:
            if not self.aborted:
                await asyncio.sleep(1000.0)
            await super().restart()

        async def abort(self) -> None:
            self.aborted += 1

        async def resume(self) -> None:
            pass

    async def work() -> float:
        loop, target = asyncio.get_running_loop(), Sampler()
        restarts = Restarts(Faults(), PhaseClock(), lambda *_, **__: None)
        worker = RestartingWorker(target, restarts=restarts, renew=target.renew)
        call = asyncio.ensure_future(worker.score("a"))
        await asyncio.sleep(100.0)
        await worker.abort()
        with pytest.raises(WorkerDied, match="abandoned"):
            await call
        ended_s = loop.time()
        await worker.resume()
        assert await worker.score("b") == "b"
        return ended_s

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(work()) < 110.0


def test_one_of_two_samplers_dies_and_only_its_share_is_requested_again(tmp_path: Path):
    two: dict[str, Any] = {"plan": {"samplers": 2, "placement": "split"}}
    whole = process(tmp_path / "whole", **two)
    assert run(whole) == "finished"
    one = process(tmp_path / "one", Script(on={"sampler1.generate": dies}), **two)
    assert run(one) == "finished"
    assert left_behind(one.folder) == left_behind(whole.folder)
    calls = [
        [call for call in each.script.calls if call.startswith("sampler0.generate")]
        for each in (one, whole)
    ]
    assert len(calls[0]) == len(calls[1])


def test_a_step_that_is_repeated_renews_no_budget():
    restarts = Restarts(Faults(restarts=1), PhaseClock(), lambda *_, **__: None)
    death = WorkerDied("sampler 0", "its process ended unexpectedly")
    restarts.step_done(3)
    restarts.pause_s(death)
    restarts.step_done(2)
    restarts.step_done(3)
    with pytest.raises(TrainingStopped, match="after 1 restarts without a new training step"):
        restarts.pause_s(death)
    restarts.step_done(4)
    restarts.pause_s(death)


def test_an_error_of_the_watch_over_hanging_processes_ends_the_run(tmp_path: Path):
    one = process(tmp_path)

    async def fails() -> None:
        raise ArithmeticError("heartbeat")

    async def work() -> None:
        one.workers._watching = asyncio.create_task(fails())
        await one.coordinator.run()

    with pytest.raises(ArithmeticError), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())
    one.folder.close()


def test_a_restart_that_was_cancelled_is_made_up_for_by_the_next_call():
    async def work() -> tuple[Mortal, str]:
        target = Mortal()
        restarts = Restarts(Faults(), PhaseClock(), lambda *_, **__: None)
        worker = RestartingWorker(target, restarts=restarts, renew=target.renew)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.score("a"), 1.5)
        return target, await worker.score("b")

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        target, found = runner.run(work())
    assert (found, target.restarts, target.renewed) == ("b", 1, 1)


def test_a_process_that_cannot_be_restarted_alone_ends_the_call():
    class Stranded(Mortal):
        async def restart(self) -> None:
            raise WorkerDied("sampler 0", "its node is gone", alone=False)

    async def work() -> None:
        restarts = Restarts(Faults(), PhaseClock(), lambda *_, **__: None)
        await RestartingWorker(Stranded(), restarts=restarts).score("a")

    with (
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
        pytest.raises(WorkerDied, match=r"^sampler 0: its node is gone$"),
    ):
        runner.run(work())


# --- heartbeats


class Watched:
    """A process that answers with a phase; None: it does not answer."""

    def __init__(self, beat: Heartbeat | None) -> None:
        self.beat = beat
        self.killed: list[str | None] = []

    async def heartbeat(self) -> Heartbeat:
        if self.beat is None:
            await asyncio.Event().wait()
        assert self.beat is not None
        return self.beat

    def kill(self, why: str | None = None) -> None:
        self.killed.append(why)

    async def restart(self) -> None:
        raise NotImplementedError


def watched(*, then: Heartbeat | None, before: str | None, seconds: float) -> list[str | None]:
    """What a process is killed for that answered once in a phase, and then otherwise."""

    async def work() -> list[str | None]:
        target = Watched(Heartbeat(before))
        beats = Heartbeats({"sampler 0": target}, Faults(silent_s=60, stuck_s=300))
        watch = asyncio.create_task(beats.watch())
        await asyncio.sleep(10)
        target.beat = then
        await asyncio.sleep(seconds)
        watch.cancel()
        return target.killed

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())


def test_a_process_that_does_not_answer_is_ended():
    assert watched(then=None, before="decode", seconds=58) == []
    (why,) = watched(then=None, before="decode", seconds=80)
    assert why == "it gave no heartbeat for 60 s, the last in the phase decode (faults.silent_s)"


@pytest.mark.parametrize("phase", ["compile", "loading"])
def test_a_process_that_loads_or_compiles_has_ten_times_as_long(phase: str | None):
    assert watched(then=None, before=phase, seconds=590) == []
    assert len(watched(then=None, before=phase, seconds=620)) == 1


def test_a_process_without_progress_is_ended():
    assert watched(then=Heartbeat("decode", 299.0), before="decode", seconds=20) == []
    why, *_ = watched(then=Heartbeat("decode", 301.0), before="decode", seconds=20)
    assert why == "its phase decode made no progress for 300 s (faults.stuck_s)"
    for phase in ("compile", "loading", "checkpoint", "export"):
        assert watched(then=Heartbeat(phase, 9e9), before=phase, seconds=20) == []


def test_time_in_which_the_watching_process_was_stopped_does_not_count():
    async def work() -> list[str | None]:
        target = Watched(None)
        beats = Heartbeats({"sampler 0": target}, Faults(silent_s=60))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        watch = asyncio.create_task(beats.watch())
        await asyncio.sleep(5)
        loop.seconds += 3600
        await asyncio.sleep(5)
        watch.cancel()
        return target.killed

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(work()) == []


def test_a_heartbeat_says_how_long_a_phase_makes_no_progress():
    clock = FakeClock()
    phases = PhaseClock(clock)
    assert phases.heartbeat() == Heartbeat()
    with phases.during("decode"):
        clock.seconds = 5.0
        assert phases.heartbeat() == Heartbeat("decode", 5.0)
        phases.take()
        assert phases.heartbeat() == Heartbeat("decode", 5.0)
        phases.progress()
        clock.seconds = 7.0
        assert phases.heartbeat() == Heartbeat("decode", 2.0)
        with phases.during("prefill"):
            assert phases.heartbeat() == Heartbeat("prefill", 0.0)


def test_pauses_grow_and_progress_renews_the_budget():
    budget = RestartBudget(5)
    assert [budget.next_pause_s() for _ in range(6)] == [1.0, 4.0, 16.0, 60.0, 60.0, None]
    budget.renew()
    assert budget.next_pause_s() == 1.0
    assert RestartBudget(0).next_pause_s() is None
