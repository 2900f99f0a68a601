"""Signals and a lost terminal: a command stops in order, at once, or goes on with `nohup`."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.cluster_fixtures import PROJECT

SHOWS = """
import asyncio, sys
from pathlib import Path
from launch.exits import say
from launch.stop import Stop
from pipeline.run.console import Console

async def run():
    stop = Stop("stopping")
    stop.listen()
    with Console("demo", status_file=Path(sys.argv[1])) as console:
        asyncio.get_running_loop().add_reader(0, stop.event.set)
        say("begun")
        await stop.event.wait()
        say("to nobody")
        console.say("to nobody")
        console.step(3, {})
        console.end("interrupted" if stop.received else "finished")
    return stop.exit_status if stop.received else 0

sys.exit(asyncio.run(run()))
"""
"""A command with a view: it ends at a signal, or when it is told to."""


def on_a_terminal(before: Callable[[], object], status: str) -> tuple[int, subprocess.Popen[bytes]]:
    """Starts a command as the first one of a terminal, whose other end is returned."""
    other, terminal = pty.openpty()

    def begin() -> None:
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
        before()

    process = subprocess.Popen(
        [sys.executable, "-c", SHOWS, status],
        cwd=PROJECT,
        env=os.environ | {"TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=terminal,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=begin,  # noqa: PLW1509  # system calls
    )
    os.close(terminal)
    shown = b""
    while b"begun" not in shown:
        shown += os.read(other, 4096)
    return other, process


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, in the tests' process
@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_stops_a_command_in_order_and_nohup_goes_on(tmp_path: Path, nohup: bool):
    status = tmp_path / "status.json"
    handler = signal.SIG_IGN if nohup else signal.SIG_DFL
    other, process = on_a_terminal(lambda: signal.signal(signal.SIGHUP, handler), str(status))
    os.close(other)
    if not nohup:
        process.wait()
    assert process.communicate(b"\n" if nohup else None)[1] == b""
    assert process.returncode == (0 if nohup else 129)
    assert f'"phase": "{"finished" if nohup else "interrupted"}"' in status.read_text()
    assert '"step": 3' in status.read_text()


STOPPED = """
import asyncio
from launch.stop import Stop

async def run():
    stop = Stop("stopping")
    stop.listen()
    print("listening", flush=True)
    await asyncio.Event().wait()

asyncio.run(run())
"""


def test_a_second_ctrl_c_ends_a_process_with_one_line():
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "listening\n"
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "stopping\n"
    child.send_signal(signal.SIGTERM)  # ignored
    child.send_signal(signal.SIGINT)
    out, err = child.communicate()
    assert (child.returncode, out, err) == (130, "", "stopped at once; nothing was waited for\n")
