"""Google Cloud's notice that it is about to stop this host, as the host's metadata server gives it.

    GET http://metadata.google.internal/computeMetadata/v1/instance/KEY?wait_for_change=true

answers when the value of KEY changes. Hosts elsewhere have no such server, and get no notice.
"""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from urllib.parse import urlencode

from launch.stop import Stop
from pipeline.run.run_folder import RunFolder

NOTICES: Mapping[str, str] = {
    "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE",
    "preempted": "TRUE",
}
"""Keys of the metadata server, and their values when the host is about to be stopped."""
NOTICE = "stop_notice"
"""Journal event: the notice."""
SERVER = "http://metadata.google.internal"
_ANSWER_S = 60
"""The server answers after so many seconds at the latest, with the value as it is."""
_PAUSE_S, _PAUSE_AFTER_ERROR_S = 1.0, 10.0

# A proxy would answer for itself.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def stop_at_notice(stop: Stop, folder: RunFolder, *, server: str = SERVER) -> None:
    """Stops the command as SIGTERM does when the notice comes; watches in threads.

    Args:
        stop: of the command, which runs in this event loop.
        folder: the run folder, whose journal gets the reason.
        server: address of the metadata server.
    """
    loop = asyncio.get_running_loop()

    def noticed(key: str, value: str) -> None:
        is_first = stop.request(f"Google Cloud is about to stop this host ({key}: {value})")
        if is_first and folder.holds_run:
            with suppress(OSError):  # the run itself reports a full disk
                folder.journal(NOTICE, key=key, value=value)

    def watch(key: str) -> None:
        wait_for_notice(key, server=server)
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(noticed, key, NOTICES[key])

    for key in NOTICES:
        threading.Thread(target=watch, args=(key,), name=key, daemon=True).start()


def wait_for_notice(
    key: str, *, server: str = SERVER, pause: Callable[[float], object] = time.sleep
) -> None:
    """Returns when a key of the metadata server has the value of the notice.

    Args:
        key: one of `NOTICES`.
        server: its address.
        pause: waits for some seconds.
    """
    tag, value = "0", None
    while value != NOTICES[key]:
        pause_s = _PAUSE_AFTER_ERROR_S
        query = {"wait_for_change": "true", "timeout_sec": _ANSWER_S, "last_etag": tag}
        request = urllib.request.Request(
            f"{server}/computeMetadata/v1/instance/{key}?{urlencode(query)}",
            headers={"Metadata-Flavor": "Google"},
        )
        with (
            suppress(OSError, HTTPException, ValueError),
            _OPENER.open(request, timeout=2 * _ANSWER_S) as answer,
        ):
            value, tag = str(answer.read(100), "utf-8").strip(), answer.headers.get("ETag", "0")
            pause_s = _PAUSE_S
        if value != NOTICES[key]:
            pause(pause_s)
