"""Signals before and beside a command's work."""

from __future__ import annotations

import asyncio
import signal

import pytest

from launch.stop import Stop, Stopped, unless


def test_a_second_ctrl_c_does_not_wait(capsys: pytest.CaptureFixture[str]):
    stop = Stop("stopping")
    stop._on(signal.SIGTERM)
    stop._on(signal.SIGTERM)
    assert stop.event.is_set()
    with pytest.raises(KeyboardInterrupt):
        stop._on(signal.SIGINT)
    assert stop.exit_status == 143
    assert capsys.readouterr().out == "stopping\n"


def test_real_signals_arrive():
    async def run() -> Stop:
        stop = Stop("stopping")
        stop.listen()
        signal.raise_signal(signal.SIGTERM)
        await stop.event.wait()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        return stop

    assert asyncio.run(run()).exit_status == 143


def test_a_signal_cancels_the_work():
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    async def run() -> None:
        stop = Stop("stopping")
        asyncio.get_running_loop().call_soon(stop.event.set)
        with pytest.raises(Stopped):
            await unless(stop, forever())
        assert ended == ["cleaned up"]

    asyncio.run(run())


def test_work_without_a_signal_completes():
    async def answer() -> int:
        return 7

    async def run() -> int:
        return await unless(Stop("stopping"), answer())

    assert asyncio.run(run()) == 7
