"""Signals before and beside a command's work."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import cluster
from launch.stop import Stop, Stopped, unless
from tests.samples import make_config

STOPPED = """
import asyncio
from launch.stop import Stop

async def run():
    stop = Stop("stopping")
    stop.listen()
    print("listening", flush=True)
    await stop.event.wait()
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up")

asyncio.run(run())
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_a_process_with_one_line(first: signal.Signals):
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "listening\n"
    child.send_signal(first)
    assert child.stdout.readline() == "stopping\n"
    child.send_signal(signal.SIGTERM)  # ignored
    child.send_signal(signal.SIGINT)
    out, err = child.communicate()
    assert (child.returncode, out, err) == (130, "", "stopped at once; nothing was waited for\n")


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


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_actors_and_cluster_and_gives_the_exit_status(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    status: int,
):
    ended: list[str] = []

    @contextmanager
    def no_cluster(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            ended.append("cluster")

    async def no_wait(*_: object, **__: object) -> None:
        pass

    async def forever(_: object) -> None:
        signal.raise_signal(number)
        await asyncio.Event().wait()

    monkeypatch.setattr(cluster, "cluster", no_cluster)
    monkeypatch.setattr(cluster, "wait_for_devices", no_wait)
    actors: Any = SimpleNamespace(devices=None, kill=lambda: ended.append("actors"))
    with pytest.raises(SystemExit) as caught:
        cluster.with_actors(lambda: actors, forever, config=make_config(tmp_path))
    assert caught.value.code == status
    assert ended == ["actors", "cluster"]
    shown = capsys.readouterr()
    assert "stopping: nothing is written" in shown.out
    assert shown.err == ""
