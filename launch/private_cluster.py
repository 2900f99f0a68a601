"""A Ray cluster of one process: on this machine's loopback, in a private folder, ended with it."""

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

import ray
from ray._private import worker as ray_worker

from actors.placement import cluster_is_gone
from launch import reaper
from launch.exits import Failure
from pipeline.contracts.folder_lock import LockedFolder

_PAUSES_S = (2.0, 8.0)
"""Before another attempt to start. Ray itself waits 30 s for a node that a busy machine delays."""
_LONGEST_PARENT = 23
"""Bytes: Ray puts Unix sockets up to 80 deeper, and accepts 103 on macOS, 107 on Linux."""
_ESSENTIAL = {"gcs_server", "raylet"}
"""Ray's processes whose end is the end of the cluster."""
_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


@contextmanager
def private_cluster(**settings: Any) -> Iterator[None]:
    """Starts Ray, and leaves no process and no file of it behind, however this process ends.

    Args:
        settings: of `ray.init`.

    Raises:
        Failure: if Ray does not start, or one of its essential processes ends before the body does.
    """
    # Made with mode 0700. Ray opens its own folder, inside, to everybody.
    folder = LockedFolder(_short_folder(), prefix="grpo-")
    try:
        with _variables(_own_token(folder.path)):
            cluster = _start(folder.path, settings)
            try:
                yield
            finally:
                cluster.stop()
                if cluster.lost is not None:
                    raise Failure(cluster.lost) from None
    finally:
        folder.remove()


class _Cluster:
    """Ray's processes, and a process that ends them when this one is gone.

    Args:
        folder: Ray's, new.
        settings: of `ray.init`.

    Attributes:
        lost: what has ended the cluster too early; None: nothing has.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.lost: str | None = None
        self._folder, self._stopping = str(folder), False
        cluster_is_gone.clear()
        self._loop = self._task = None
        with suppress(RuntimeError):  # there is no event loop
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        # In a session of its own: signals to the terminal's processes do not reach it.
        self._reaper = subprocess.Popen(
            [sys.executable, "-P", reaper.__file__, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            # Inherited by the processes that Ray starts, and by no other child of this one.
            with _variables({reaper.VARIABLE: self._folder}):
                ray.init(
                    address="local", include_dashboard=False, _temp_dir=self._folder, **settings
                )
            # What the agents tell of a raylet that ended is 20 lines of its log.
            ray_worker.print_to_stdstream = lambda *_, **__: None
            for name, pid in _essential(self._folder).items():
                threading.Thread(target=self._watch, args=(name, pid), daemon=True).start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends all processes."""
        self._stopping = True
        ray.shutdown()
        self._reaper.communicate()

    def _watch(self, name: str, pid: int) -> None:
        """Waits for the end of a process, and ends the body if that comes too early."""
        with suppress(ChildProcessError):  # Ray has asked for its exit status
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if self._stopping or self.lost is not None:
            return
        self.lost = (
            f"Ray's process {name} (pid {pid}) ended unexpectedly, and with it this command; a run "
            "goes on from its last checkpoint with the same command"
        )
        cluster_is_gone.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)
        # Otherwise Ray's calls would wait for minutes for an answer.
        reaper.end_processes(self._folder)


def _essential(folder: str) -> dict[str, int]:
    """Names and pids of the processes that the cluster cannot do without.

    Raises:
        RuntimeError: if one of them is not there.
    """
    found = {process.name(): process.pid for process in reaper.processes(folder)}
    if not found.keys() >= _ESSENTIAL:
        raise RuntimeError(f"{' or '.join(sorted(_ESSENTIAL))} ended at once.")
    return {name: found[name] for name in _ESSENTIAL}


def _start(folder: Path, settings: Mapping[str, Any]) -> _Cluster:
    """Raises `Failure` after several attempts, each in a folder of its own."""
    _end_at_signals()
    for number, pause_s in enumerate((*_PAUSES_S, None)):
        try:
            return _Cluster(folder / str(number), settings)
        except SystemExit:  # of a handler of SIGTERM that Ray has installed, with status 15
            raise SystemExit(128 + signal.SIGTERM) from None
        except Exception as error:  # noqa: BLE001  # Ray raises plain ones
            shutil.rmtree(folder / str(number), ignore_errors=True)
            what = (str(error).splitlines() or [type(error).__name__])[0]
            if pause_s is None:
                raise Failure(
                    f"Ray did not start in {number + 1} attempts: {what} Is the machine very busy, "
                    "or short of memory? Nothing is lost; try the same command later"
                ) from None
            print(f"Ray did not start: {what} Trying again in {pause_s:g} s", flush=True)
            time.sleep(pause_s)
    raise AssertionError


def _end_at_signals() -> None:
    """SIGINT and SIGTERM end this process, until the event loop handles them again.

    The loop's handlers would wait for Ray's start, which blocks the loop.
    """

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    with suppress(RuntimeError):  # there is no event loop
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGINT)  # raises KeyboardInterrupt then
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, end)


def _own_token(folder: Path) -> dict[str, str]:
    """Variables for a token that only this cluster accepts, unless the user has named one."""
    if {_TOKEN, _TOKEN_PATH} & os.environ.keys():
        return {}
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(_token(), encoding="ascii")
    return {_TOKEN_PATH: str(path)}


@cache
def _token() -> str:
    """Ray reads it once in a process."""
    return secrets.token_hex(32)


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that are new, for a while."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def _short_folder() -> Path:
    """Where temporary files go, unless its name is too long for sockets."""
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= _LONGEST_PARENT else "/tmp")
