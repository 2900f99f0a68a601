"""Ends the processes of a private Ray cluster once the process that started it is gone.

    python launch/reaper.py FOLDER

Ray's own processes notice the death of the driver, the raylet or the GCS after up to 5 minutes.
This process waits for the end of its standard input, which only the driver holds open. It imports
neither the project nor Ray.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

import psutil

VARIABLE = "GEMMA_GRPO_CLUSTER"
"""Environment variable with the cluster's folder, which its processes inherit."""
_KILL_TIMEOUT_S = 30.0
"""Time limit for killed processes to end; an uninterruptible system call may delay them."""


def end_processes(folder: str) -> None:
    """Kills all processes of the cluster in `folder`; returns when they are gone."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while (found := processes(folder)) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=0.2)


def processes(folder: str) -> list[psutil.Process]:
    """Returns the running processes of the cluster in `folder`, except this one and its parent.

    They are found by `VARIABLE`, or by log files in the folder: the environment of processes that
    rename themselves, as Ray's agents do, cannot be read. The driver writes there, too.
    """
    found = []
    for process in psutil.process_iter():
        # Processes of other users cannot be read; they belong to other clusters.
        with suppress(psutil.Error, OSError):
            if process.pid not in {os.getpid(), os.getppid()} and (
                process.environ().get(VARIABLE) == folder or _writes_below(process, folder)
            ):
                found.append(process)
    return found


def _writes_below(process: psutil.Process, folder: str) -> bool:
    return any(
        file.path.startswith(f"{folder}/") and getattr(file, "mode", "w") != "r"
        for file in process.open_files()
    )


def main() -> None:
    """Waits for the end of the driver, then ends the cluster's processes."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_processes(sys.argv[1])


if __name__ == "__main__":
    main()
