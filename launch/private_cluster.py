"""A private Ray cluster on this machine's loopback, in a private folder, for one process."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker

from actors.placement import cluster_is_gone
from launch import reaper
from launch.exits import Failure
from pipeline.contracts.folder_lock import LockedFolder

_RETRY_PAUSES_S = (2.0, 8.0)
"""Pauses between attempts to start. Ray itself waits 30 s for a node on a busy machine."""
_MAX_PARENT_BYTES = 23
"""Longest parent folder: Ray's Unix sockets add up to 80 bytes; 103 fit on macOS, 107 on Linux."""
_ESSENTIAL = {"gcs_server", "raylet"}
"""Ray's processes that the cluster cannot run without."""
_STOPPED_S, _STOPS_POLL_S = 20.0, 1.0
"""Seconds for which one of them may be stopped, and between two looks."""
_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


class ClusterLost(Failure):
    """An essential process of Ray ended; the same command resumes the run."""


@contextmanager
def private_cluster(**settings: Any) -> Iterator[None]:
    """Starts Ray; no process and no file of it remains, however this process ends.

    Args:
        settings: of `ray.init`.

    Raises:
        Failure: if Ray does not start.
        ClusterLost: if one of its essential processes ends before the body does.
    """
    # This folder has mode 0700. Ray makes its own folder inside readable to everybody.
    folder = LockedFolder(_short_folder(), prefix="grpo-")
    try:
        with _environment(_own_token(folder.path)):
            cluster = _start(folder.path, settings)
            try:
                yield
            finally:
                cluster.stop()
                if cluster.lost is not None:
                    raise ClusterLost(cluster.lost) from None
    finally:
        folder.remove()


class _Cluster:
    """Ray's processes, and a reaper process that ends them when this process is gone.

    Args:
        folder: Ray's folder, which does not exist yet.
        settings: of `ray.init`.

    Attributes:
        lost: why the cluster ended too early; None: it did not.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.lost: str | None = None
        self._folder, self._stopping = str(folder), False
        cluster_is_gone.clear()
        self._loop = self._task = None
        with suppress(RuntimeError):  # no event loop
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        # In a separate session: signals to the terminal's processes do not reach it.
        self._reaper = subprocess.Popen(
            [sys.executable, "-P", reaper.__file__, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            # Inherited by the processes that Ray starts, and by no other child process.
            with _environment({reaper.VARIABLE: self._folder}):
                ray.init(
                    address="local", include_dashboard=False, _temp_dir=self._folder, **settings
                )
            # Ray's agents would print 20 lines of the log of a raylet that ended.
            ray_worker.print_to_stdstream = lambda *_, **__: None
            for name, pid in _essential_processes(self._folder).items():
                for watch in (self._watch, self._watch_stops):
                    threading.Thread(target=watch, args=(name, pid), daemon=True).start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends all processes."""
        self._stopping = True
        ray.shutdown()
        self._reaper.communicate()

    def _watch(self, name: str, pid: int) -> None:
        """Waits for the end of a process; cancels the body if the end comes too early."""
        with suppress(ChildProcessError):  # Ray has read its exit status
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if self._stopping or self.lost is not None:
            return
        self.lost = (
            f"Ray's process {name} (pid {pid}) ended unexpectedly, which ended this command; the "
            "same command resumes the run from its last checkpoint"
        )
        cluster_is_gone.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)
        # Otherwise Ray's calls would wait for an answer for minutes.
        reaper.end_processes(self._folder)

    def _watch_stops(self, _: str, pid: int) -> None:
        """Kills a process that stays stopped: Ray would wait for it for minutes."""
        stopped_s = 0.0
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            while True:
                time.sleep(_STOPS_POLL_S)
                is_stopped = process.status() == psutil.STATUS_STOPPED
                stopped_s = stopped_s + _STOPS_POLL_S if is_stopped else 0.0
                if stopped_s >= _STOPPED_S:
                    process.kill()


def _essential_processes(folder: str) -> dict[str, int]:
    """Returns names and pids of the processes that the cluster cannot run without.

    Raises:
        RuntimeError: if one of them is missing.
    """
    found = {process.name(): process.pid for process in reaper.processes(folder)}
    if not found.keys() >= _ESSENTIAL:
        raise RuntimeError(f"{' or '.join(sorted(_ESSENTIAL))} ended at once.")
    return {name: found[name] for name in _ESSENTIAL}


def _start(folder: Path, settings: Mapping[str, Any]) -> _Cluster:
    """Starts the cluster, in several attempts with a new folder each.

    Raises:
        Failure: if all attempts fail.
    """
    _end_at_signals()
    for number, pause_s in enumerate((*_RETRY_PAUSES_S, None)):
        try:
            return _Cluster(folder / str(number), settings)
        except SystemExit:  # raised by Ray's SIGTERM handler, with status 15
            raise SystemExit(128 + signal.SIGTERM) from None
        except Exception as error:  # noqa: BLE001  # Ray raises plain exceptions
            shutil.rmtree(folder / str(number), ignore_errors=True)
            message = (str(error).splitlines() or [type(error).__name__])[0]
            if pause_s is None:
                raise Failure(
                    f"Ray did not start in {number + 1} attempts: {message} Is the machine very "
                    "busy, or short of memory? Nothing is lost; repeat the command later"
                ) from None
            print(f"Ray did not start: {message} Retrying in {pause_s:g} s", flush=True)
            time.sleep(pause_s)
    raise AssertionError


def _end_at_signals() -> None:
    """Makes SIGINT and SIGTERM end this process, until the event loop handles them again.

    The loop's handlers would only run after Ray's start, which blocks the loop.
    """

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    with suppress(RuntimeError):  # no event loop
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGINT)  # SIGINT then raises KeyboardInterrupt
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, end)


def _own_token(folder: Path) -> dict[str, str]:
    """Returns variables for a token that only this cluster accepts, unless the user sets one."""
    if {_TOKEN, _TOKEN_PATH} & os.environ.keys():
        return {}
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(_token(), encoding="ascii")
    return {_TOKEN_PATH: str(path)}


@cache
def _token() -> str:
    """One token for all clusters of this process: Ray reads it only once."""
    return secrets.token_hex(32)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets new environment variables inside the block."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def _short_folder() -> Path:
    """Returns the folder of temporary files, or /tmp if its path is too long for sockets."""
    default = tempfile.gettempdir()
    return Path(default if len(os.fsencode(default)) <= _MAX_PARENT_BYTES else "/tmp")
