"""The handles of Ray actors: errors, deaths, and the same model on all nodes; with fake actors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayTaskError

from actors.groups import ModelActors
from actors.handles import ModelHandle
from actors.placement import Reservation


def fake_actor(**answers: Any) -> Any:
    """A Ray actor: what each of its methods returns, or raises."""

    def method(answer: Any) -> Any:
        async def remote(*_: Any, **__: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(remote=remote)

    return SimpleNamespace(**{name: method(answer) for name, answer in answers.items()})


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("method", "traceback", cause)


def test_nodes_must_have_the_same_model():
    def start(*found: Any) -> None:
        """Starts a process on each node, which finds or does not find the model."""
        workers = [
            ModelHandle(fake_actor(find_model=one, node=f"node {number}"), f"sampler {number}")
            for number, one in enumerate(found)
        ]
        asyncio.run(ModelActors(cast("Reservation", None), workers).started())

    start("same", "same")
    with pytest.raises(FileNotFoundError, match=r"^no folder /m; this is on node 1, where sampler"):
        start("same", task_error(FileNotFoundError("no folder /m")))
    with pytest.raises(ValueError, match="the weights on node 1 differ from those on node 0; put"):
        start("one", "two")
