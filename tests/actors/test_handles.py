"""The proxy of Ray actors: calls, errors, adapters that stay in the object store; with fakes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError, RayTaskError

from actors.handles import DeviceActors, RayScorer, RayWorker
from actors.placement import Bundle, Reservation
from pipeline.contracts.adapters import Published
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.workers import WorkerDied


class FakeMethod:
    """A method of a Ray actor; `answer` computes the value of the reference."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer
        self._returns = 1

    def options(self, *, num_returns: int) -> FakeMethod:
        self._returns = num_returns
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        async def reference(number: int) -> Any:
            value = self._answer(*args, **kwargs)
            return value if self._returns == 1 else value[number]

        if self._returns == 1:
            return reference(0)
        # The driver awaits the first reference only; the others stay in the object store.
        return reference(0), *(f"reference {n}" for n in range(1, self._returns))


class FakeActor:
    def __init__(self, **methods: Callable[..., Any]) -> None:
        for name, answer in methods.items():
            setattr(self, name, FakeMethod(answer))


def worker_of(actor: FakeActor) -> RayWorker:
    return RayWorker(lambda: actor, name="learner")


def raises(error: Exception) -> Callable[..., Any]:
    def answer(*_: Any, **__: Any) -> Any:
        raise error

    return answer


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("method", "traceback", cause)


def test_each_method_of_the_actor_is_an_async_method():
    worker = worker_of(FakeActor(score=lambda rows, *, which: (rows, which)))
    assert asyncio.run(worker.score([1, 2], which="current")) == ([1, 2], "current")
    with pytest.raises(AttributeError):
        worker.no_such_method  # noqa: B018
    assert copy.copy(worker).actor is worker.actor


@pytest.mark.parametrize("error", [ValueError("wrong"), OutOfMemory("update", "no room")])
def test_an_error_of_the_actor_is_raised_unchanged(error: Exception):
    worker = worker_of(FakeActor(update=raises(task_error(error))))
    with pytest.raises(type(error)) as caught:
        asyncio.run(worker.update([]))
    assert caught.value is error
    assert caught.value.__cause__ is None


def test_a_dead_process_is_named():
    worker = worker_of(FakeActor(update=raises(RayActorError())))
    with pytest.raises(WorkerDied, match=r"^learner: its process ended unexpectedly$"):
        asyncio.run(worker.update([]))


def test_an_adapter_is_published_and_loaded_as_a_reference():
    loaded: list[tuple[Any, ...]] = []

    def load(version: int, sha256: str, payload: Any) -> str:
        loaded.append((version, sha256, payload))
        return sha256

    learner = worker_of(FakeActor(publish=lambda *, which: ((3, f"hash of {which}"), "arrays")))
    sampler = worker_of(FakeActor(load=load))
    published = asyncio.run(learner.publish("best"))
    assert published == Published(3, "hash of best", "reference 1")
    assert asyncio.run(sampler.load(published)) == "hash of best"
    assert loaded == [(3, "hash of best", "reference 1")]


def test_a_cancelled_score_is_cancelled_in_the_actor(monkeypatch: pytest.MonkeyPatch):
    class Waiting:
        async def _wait(self) -> None:
            await asyncio.Event().wait()

        def __await__(self) -> Any:
            return self._wait().__await__()

    ref, cancelled = Waiting(), list[object]()
    monkeypatch.setattr("ray.cancel", cancelled.append)
    actor = SimpleNamespace(score=SimpleNamespace(remote=lambda _: ref))

    async def run() -> None:
        task = asyncio.create_task(RayScorer(lambda: actor, name="rewards").score([]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert cancelled == [ref]


class FakeBundle:
    """Devices on a node, which may be gone."""

    def __init__(self, *, stranded: bool = False, node: str | None = "node b") -> None:
        self.devices = SimpleNamespace(is_stranded=lambda: stranded)
        self.node = node

    async def settled(self) -> None:
        pass


def restart(monkeypatch: pytest.MonkeyPatch, bundle: FakeBundle, **methods: Callable[..., Any]):
    """Restarts a process with devices; returns the error."""
    monkeypatch.setattr("ray.kill", lambda _: None)
    actor = FakeActor(**methods)
    worker = RayWorker(lambda: actor, name="sampler 0", bundle=cast("Bundle", bundle))
    with pytest.raises(WorkerDied) as caught:
        asyncio.run(worker.restart())
    return caught.value


def test_a_process_that_has_to_change_its_node_with_others_is_not_restarted_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    error = restart(monkeypatch, FakeBundle(stranded=True))
    assert not error.alone
    assert str(error).startswith("sampler 0: its node is gone, and only the node of this command")


def test_a_node_without_the_model_cannot_have_the_restarted_process(
    monkeypatch: pytest.MonkeyPatch,
):
    missing = raises(task_error(FileNotFoundError("model.path: no folder /m")))
    ready = {"__ray_ready__": lambda: True}
    error = restart(monkeypatch, FakeBundle(), find_model=missing, **ready)
    assert error.alone
    assert str(error).startswith("sampler 0: model.path: no folder /m; this is on node b, where")


def test_where_no_node_has_devices_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("actors.handles._START_S", 0.0)
    error = restart(monkeypatch, FakeBundle(node=None), __ray_ready__=lambda: True)
    assert str(error) == "sampler 0: its node is gone, and no other had devices for it in 0 s"


def started(*found: Callable[..., Any]) -> None:
    """Starts a process on each node, which finds or does not find the model."""
    workers = tuple(
        RayWorker(
            partial(FakeActor, find_model=answer),
            name=f"sampler {number}",
            bundle=cast("Bundle", FakeBundle(node=f"node {number}")),
        )
        for number, answer in enumerate(found)
    )
    asyncio.run(DeviceActors(cast("Reservation", None), workers).started())


def test_nodes_must_have_the_same_model():
    started(lambda: "same", lambda: "same", raises(RayActorError()))
    with pytest.raises(FileNotFoundError, match=r"^no folder /m; this is on node 1, where sampler"):
        started(lambda: "same", raises(task_error(FileNotFoundError("no folder /m"))))
    with pytest.raises(ValueError, match="the weights on node 1 differ from those on node 0; put"):
        started(lambda: "one", lambda: "two")
