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
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import ray
from ray._private import worker as ray_worker

from launch import reaper
from launch.exits import Failure, say
from launch.ray_watch import RayWatch
from pipeline.contracts.folder_lock import LockedFolder

_RETRY_PAUSES_S = (2.0, 8.0)
"""Pauses between attempts to start. Ray itself waits 30 s for a node on a busy machine."""
_MAX_PARENT_BYTES = 23
"""Longest parent folder: Ray's Unix sockets add up to 80 bytes; 103 fit on macOS, 107 on Linux."""
_ESSENTIAL = {"gcs_server", "raylet"}
"""Ray's processes that the cluster cannot run without."""
_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


@contextmanager
def private_cluster(**settings: Any) -> Iterator[RayWatch]:
    """Starts Ray; no process and no file of it remains, however this process ends.

    Args:
        settings: of `ray.init`.

    Yields:
        The watch over Ray's essential processes.

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
                yield cluster.watch
            finally:
                cluster.stop()
                cluster.watch.raise_if_lost()
    finally:
        folder.remove()


class _Cluster:
    """Ray's processes, and a reaper process that ends them when this process is gone.

    Args:
        folder: Ray's folder, which does not exist yet.
        settings: of `ray.init`.

    Attributes:
        watch: over Ray's essential processes.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = str(folder)
        self.watch = RayWatch(lambda: reaper.end_processes(self._folder))
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
            self.watch.begin(_essential_processes(self._folder))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends all processes."""
        self.watch.stop()
        ray.shutdown()
        self._reaper.communicate()


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
            say(f"Ray did not start: {message} Retrying in {pause_s:g} s")
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
