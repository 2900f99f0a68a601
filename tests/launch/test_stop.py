"""Signals before and beside a command's work."""

from __future__ import annotations

import signal
import subprocess
import sys

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
