"""A private Ray cluster on this machine's loopback, in a private folder, for one process."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import parameter
from ray._private import worker as ray_worker

from launch.exits import EXIT_DIED, EXIT_FAILED, Failure
from launch.flags import SUPERVISOR
from pipeline.run.folder_lock import LockedFolder

_PARENT = Path("/tmp")
"""As Ray itself: its Unix sockets add up to 80 bytes to the folder's path, and 107 fit."""


@contextmanager
def private_cluster(**settings: Any) -> Iterator[None]:
    """Starts Ray, with a token of its own; no process of it remains, however this process ends.

    Linux kills Ray's own processes with this one (Ray asks for that), and actors with Ray's
    (`rewards.processes.parent`). Ray's two agents of a killed process end by themselves after 60 s.

    Args:
        settings: of `ray.init`.

    Raises:
        Failure: if Ray does not start.
    """
    # This folder has mode 0700. Ray makes its own folder inside readable to everybody.
    folder = LockedFolder(_PARENT, prefix="grpo-")
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        # For all clusters of this process: Ray reads it only once.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        _start(folder.path / "r", settings)
        try:
            yield
        finally:
            ray.shutdown()
    finally:
        folder.remove()


def _start(folder: Path, settings: Mapping[str, Any]) -> None:
    """Starts the cluster.

    Raises:
        Failure: if Ray does not start; the parent of a run starts the run again.
    """
    # It would warn that the token of this cluster is used, and name the way to do without.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel("ERROR")
    # Ray starts its processes with execve right after the fork, so that JAX's threads do no harm.
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    try:
        with _any_agent_port():
            ray.init(address="local", include_dashboard=False, _temp_dir=str(folder), **settings)
    except SystemExit:  # raised by Ray's SIGTERM handler, with status 15
        raise SystemExit(128 + signal.SIGTERM) from None
    except Exception as error:  # noqa: BLE001  # Ray raises plain exceptions
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise Failure(
            f"Ray did not start: {message} Is the machine very busy, or short of memory?",
            EXIT_DIED if SUPERVISOR in os.environ else EXIT_FAILED,
        ) from None
    # Ray's agents would print 20 lines of the log of a raylet that ended.
    ray_worker.print_to_stdstream = lambda *_, **__: None


@contextmanager
def _any_agent_port() -> Iterator[None]:
    """Lets Ray's agent listen on a free port instead of 52365, which a `ray start` needs for jobs.

    `ray start` has `--dashboard-agent-listen-port`; `ray.init` has no argument for it.
    """
    original = parameter.RayParams
    parameter.RayParams = partial(original, dashboard_agent_listen_port=0)
    try:
        yield
    finally:
        parameter.RayParams = original
