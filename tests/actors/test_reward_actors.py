"""Invariant 6 for processes that hang or die: other inputs keep their scores, none scores zero."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from actors.reward_actors import MAX_CONSECUTIVE_FAILURES, RewardActor, RewardPool, WorkerDied

from configs.schema import RewardFunction, Rewards
from rewards.base import Outcome, RewardInput, Tags

TAGS = Tags("<r>", "</r>", "<a>", "</a>")


def one(text: str) -> RewardInput:
    return RewardInput("prompt", text, "eos", "answer", {}, TAGS)


def rewards(*names: str, workers: int = 1, timeout_s: float = 30.0) -> Rewards:
    functions = [RewardFunction(name=name, function="rewards.x:y") for name in names]
    return Rewards(functions=tuple(functions), workers=workers, timeout_s=timeout_s)


@dataclass
class FakeWorker:
    """Scores a text by its length; `hang` in a text never returns, `die` ends the process."""

    started: bool = False
    killed: bool = False
    calls: list[tuple[str, list[str]]] = field(default_factory=list)

    async def start(self) -> None:
        self.started = True

    async def score(self, name: str, inputs: Sequence[RewardInput]) -> list[Outcome]:
        assert self.started
        assert not self.killed
        texts = [given.completion for given in inputs]
        self.calls.append((name, texts))
        if any("hang" in text for text in texts):
            await asyncio.Event().wait()
        if any("die" in text for text in texts):
            raise WorkerDied
        offset = {"length": 0, "twice": 100}[name]
        return [Outcome(offset + len(text), None) for text in texts]

    def kill(self) -> None:
        self.killed = True


@dataclass
class Bench:
    """A pool and all workers that it spawned."""

    config: Rewards
    workers: list[FakeWorker] = field(default_factory=list)

    def spawn(self) -> FakeWorker:
        self.workers.append(FakeWorker())
        return self.workers[-1]

    def score(self, *texts: str) -> list[dict[str, Outcome]]:
        async def run() -> list[dict[str, Outcome]]:
            pool = RewardPool(self.config, self.spawn)
            await pool.start()
            try:
                return await pool.score([one(text) for text in texts])
            finally:
                pool.close()

        scored = asyncio.run(run())
        assert all(worker.killed for worker in self.workers)
        return scored

    def calls(self, worker: int) -> list[list[str]]:
        return [texts for _, texts in self.workers[worker].calls]


def values(scored: list[dict[str, Outcome]], name: str = "length") -> list[float | None]:
    return [row[name].value for row in scored]


def test_inputs_are_split_in_order_and_scored_by_every_function():
    bench = Bench(rewards("length", "twice", workers=3))
    texts = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg"]
    scored = bench.score(*texts)
    assert values(scored) == [1, 2, 3, 4, 5, 6, 7]
    assert values(scored, "twice") == [101, 102, 103, 104, 105, 106, 107]
    assert [worker.calls for worker in bench.workers] == [
        [(name, part) for name in ("length", "twice")]
        for part in (texts[:3], texts[3:6], texts[6:])
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_fewer_inputs_than_workers(count: int):
    bench = Bench(rewards("length", workers=5))
    assert values(bench.score(*["x"] * count)) == [1] * count
    assert sum(len(worker.calls) for worker in bench.workers) == count


def test_invariant_6_a_hanging_input_is_found_and_the_others_keep_their_scores():
    bench = Bench(rewards("length", timeout_s=0.01))
    scored = bench.score("a", "bb", "hang", "dddd")
    assert values(scored) == [1, 2, None, 4]
    assert scored[2]["length"].error == "took longer than 0.01 s"
    # The batch, then each input alone; a worker that did not answer is not used again.
    assert bench.calls(0) == [["a", "bb", "hang", "dddd"]]
    assert bench.calls(1) == [["a"], ["bb"], ["hang"]]
    assert bench.calls(2) == [["dddd"]]
    assert len(bench.workers) == 3


def test_invariant_6_an_input_that_kills_the_process_is_found():
    bench = Bench(rewards("length"))
    scored = bench.score("die", "bb")
    assert values(scored) == [None, 2]
    assert scored[0]["length"].error == "its process died"
    assert len(bench.workers) == 3


def test_invariant_6_only_the_failed_function_loses_its_value():
    class Picky(FakeWorker):
        async def score(self, name: str, inputs: Sequence[RewardInput]) -> list[Outcome]:
            if name == "twice" and any(given.completion == "b" for given in inputs):
                raise WorkerDied
            return await super().score(name, inputs)

    bench = Bench(rewards("length", "twice"))

    def spawn() -> FakeWorker:
        bench.workers.append(Picky())
        return bench.workers[-1]

    bench.spawn = spawn  # type: ignore[method-assign]
    scored = bench.score("a", "b")
    assert values(scored) == [1, 1]
    assert values(scored, "twice") == [101, None]


def test_after_consecutive_failures_the_remaining_inputs_fail():
    bench = Bench(rewards("length"))
    bad = ["die"] * MAX_CONSECUTIVE_FAILURES
    scored = bench.score("a", *bad, "e", "f")
    assert values(scored) == [1, *[None] * MAX_CONSECUTIVE_FAILURES, None, None]
    assert {row["length"].error for row in scored[1:]} == {"its process died"}
    # One worker for the batch and one per failure; the last one is replaced only by a later call.
    assert len(bench.workers) == 1 + MAX_CONSECUTIVE_FAILURES
    assert bench.workers[-1].calls == [("length", ["die"])]


def test_a_success_between_failures_resets_the_count():
    bench = Bench(rewards("length"))
    texts = ["die", "die", "a", "die", "die", "b", "c"]
    assert values(bench.score(*texts)) == [None, None, 1, None, None, 1, 1]


def test_a_hanging_worker_does_not_affect_the_others():
    bench = Bench(rewards("length", workers=2, timeout_s=0.01))
    assert values(bench.score("hang", "hang", "c", "d")) == [None, None, 1, 1]
    assert bench.workers[1].calls == [("length", ["c", "d"])]


def test_a_replacement_worker_serves_the_next_step():
    async def run() -> list[list[float | None]]:
        pool = RewardPool(rewards("length"), bench.spawn)
        await pool.start()
        return [values(await pool.score([one(text)])) for text in ("die", "aa", "bbb")]

    bench = Bench(rewards("length"))
    assert asyncio.run(run()) == [[None], [2], [3]]
    # A batch of one is not scored a second time.
    assert [worker.killed for worker in bench.workers] == [True, False]


class Unstartable(FakeWorker):
    """A worker that cannot import the functions."""

    async def start(self) -> None:
        raise ValueError("'my_rewards:f': importing my_rewards raises SyntaxError: \udc80")


def test_invariant_6_a_replacement_that_fails_to_start_is_counted_and_retried():
    bench = Bench(rewards("length"))
    kinds = [FakeWorker, Unstartable, Unstartable, FakeWorker]

    def spawn() -> FakeWorker:
        bench.workers.append(kinds[len(bench.workers)]())
        return bench.workers[-1]

    async def run() -> list[list[dict[str, Outcome]]]:
        pool = RewardPool(bench.config, spawn)
        await pool.start()
        return [await pool.score([one(text)]) for text in ("die", "aa", "bb", "ccc")]

    scored = [rows[0]["length"] for rows in asyncio.run(run())]
    why = (
        r"its process did not start: ValueError: 'my_rewards:f': importing my_rewards raises "
        r"SyntaxError: \udc80"
    )
    lost = [Outcome(None, "its process died"), Outcome(None, why), Outcome(None, why)]
    assert scored == [*lost, Outcome(3, None)]
    assert [worker.killed for worker in bench.workers] == [True, True, True, False]


def test_invariant_6_a_replacement_that_never_starts_times_out(
    monkeypatch: pytest.MonkeyPatch,
):
    class Hangs(FakeWorker):
        async def start(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("actors.reward_actors.RESTART_TIMEOUT_S", 0.01)
    bench = Bench(rewards("length"))

    def spawn() -> FakeWorker:
        bench.workers.append(Hangs() if bench.workers else FakeWorker())
        return bench.workers[-1]

    bench.spawn = spawn  # type: ignore[method-assign]
    scored = bench.score("die", "bb")
    assert values(scored) == [None, None]
    assert scored[1]["length"].error == "its process did not start: TimeoutError"


class TestRewardActor:
    """The reward process itself."""

    def test_functions_are_imported_at_the_start(self) -> None:
        actor = RewardActor(
            Rewards(
                functions=(
                    RewardFunction(name="correct", function="rewards.correctness:exact_answer"),
                )
            )
        )
        actor.start()
        right, wrong = (
            RewardInput("", f"<a>{answer}</a>", "eos", "7", {}, TAGS) for answer in (7, 8)
        )
        assert actor.score("correct", [right, wrong]) == [Outcome(1.0, None), Outcome(0.0, None)]

    def test_a_missing_function_is_reported_at_the_start(self) -> None:
        actor = RewardActor(rewards("gone"))
        with pytest.raises(ValueError, match=r"'rewards\.x:y': no module 'rewards\.x'"):
            actor.start()


def test_the_configured_number_of_workers_is_spawned():
    bench = Bench(rewards("length", workers=4))
    pool = RewardPool(bench.config, bench.spawn)
    asyncio.run(pool.start())
    assert [(worker.started, worker.killed) for worker in bench.workers] == [(True, False)] * 4
    pool.close()
    assert [worker.killed for worker in bench.workers] == [True] * 4
