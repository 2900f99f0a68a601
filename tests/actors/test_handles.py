"""The handles of Ray actors: errors and cancelled calls; with fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError, RayTaskError

from actors.groups import ModelActors
from actors.handles import ColocatedHandle, ModelHandle
from actors.placement import Reservation
from pipeline.protocols import OutOfMemory, WorkerDied


class FakeMethod:
    """A method of a Ray actor; `answer` computes the value of the reference."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(*args, **kwargs)


class FakeActor:
    def __init__(self, **methods: Callable[..., Any]) -> None:
        for name, answer in methods.items():
            setattr(self, name, FakeMethod(answer))


def worker_of(actor: FakeActor) -> ColocatedHandle:
    return ColocatedHandle(actor, "learner")


def raises(error: Exception) -> Callable[..., Any]:
    def answer(*_: Any, **__: Any) -> Any:
        raise error

    return answer


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("method", "traceback", cause)


def test_an_error_of_the_actor_is_raised_unchanged_and_a_dead_process_is_named():
    error = OutOfMemory("update", "no room")
    with pytest.raises(OutOfMemory) as caught:
        asyncio.run(worker_of(FakeActor(update=raises(task_error(error)))).update([]))
    assert caught.value is error
    with pytest.raises(WorkerDied, match=r"^learner: its process ended unexpectedly$"):
        asyncio.run(worker_of(FakeActor(update=raises(RayActorError()))).update([]))


def started(*found: Callable[..., Any]) -> None:
    """Starts a process on each node, which finds or does not find the model."""
    workers = [
        ModelHandle(
            FakeActor(find_model=answer, node=partial(str.format, "node {}", number)),
            f"sampler {number}",
        )
        for number, answer in enumerate(found)
    ]
    asyncio.run(ModelActors(cast("Reservation", None), workers).started())


def test_nodes_must_have_the_same_model():
    started(lambda: "same", lambda: "same")
    with pytest.raises(FileNotFoundError, match=r"^no folder /m; this is on node 1, where sampler"):
        started(lambda: "same", raises(task_error(FileNotFoundError("no folder /m"))))
    with pytest.raises(ValueError, match="the weights on node 1 differ from those on node 0; put"):
        started(lambda: "one", lambda: "two")
