"""The notice of a metadata server, on a real HTTP server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from launch.maintenance import NOTICES, stop_at_notice, wait_for_notice
from launch.stop import Stop
from pipeline.run.run_folder import RunFolder
from tests.samples import make_config

PATIENCE_S = 60.0


class Metadata:
    """Answers as Google Cloud's metadata server does; both keys change together."""

    def __init__(self) -> None:
        self.values = {"maintenance-event": "NONE", "preempted": "FALSE"}
        self.tag = "a"
        self.asked: list[str] = []
        self.state = threading.Condition()
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query, key = (
                    parse_qs(url.query),
                    url.path.removeprefix("/computeMetadata/v1/instance/"),
                )
                ours = self.headers["Metadata-Flavor"] == "Google"
                if not ours or query["wait_for_change"] != ["true"]:
                    self.send_error(403)
                    return
                with metadata.state:
                    metadata.asked.append(key)
                    metadata.state.notify_all()
                    (last,) = query["last_etag"]
                    metadata.state.wait_for(lambda: metadata.tag != last, PATIENCE_S)
                    text, tag = metadata.values[key], metadata.tag
                self.send_response(200)
                self.send_header("ETag", tag)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def set(self, key: str, value: str) -> None:
        with self.state:
            self.values[key], self.tag = value, self.tag + "a"
            self.state.notify_all()

    def await_questions(self, count: int) -> None:
        with self.state:
            assert self.state.wait_for(lambda: len(self.asked) >= count, PATIENCE_S)

    def close(self) -> None:
        self.set("preempted", "TRUE")  # ends what waits
        self.set("maintenance-event", NOTICES["maintenance-event"])
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata()
    yield server
    server.close()


@pytest.mark.parametrize("key", NOTICES)
def test_a_notice_is_awaited(metadata: Metadata, key: str):
    pauses: list[float] = []
    waiting = threading.Thread(
        target=wait_for_notice, args=(key,), kwargs={"server": metadata.url, "pause": pauses.append}
    )
    waiting.start()
    metadata.await_questions(2)  # the first is answered at once
    metadata.set(key, "MIGRATE_ON_HOST_MAINTENANCE")
    metadata.await_questions(3)
    metadata.set(key, NOTICES[key])
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert pauses == [1.0, 1.0]


def test_without_a_metadata_server_nothing_happens(
    metadata: Metadata, capfd: pytest.CaptureFixture[str]
):
    class EnoughError(Exception):
        pass

    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise EnoughError

    metadata.server.shutdown()
    metadata.server.server_close()
    with pytest.raises(EnoughError):
        wait_for_notice("preempted", server=metadata.url, pause=pause)
    assert pauses == [10.0] * 3
    assert capfd.readouterr() == ("", "")


def test_a_notice_stops_the_run_as_sigterm_does_and_is_journaled(
    metadata: Metadata,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("launch.stop._end_at_ctrl_c", lambda: None)
    config = make_config(tmp_path)
    folder = RunFolder.of(config)
    folder.create(config)
    metadata.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")

    async def run() -> Stop:
        stop = Stop("stopping")
        stop_at_notice(stop, folder, server=metadata.url)
        await stop.event.wait()
        return stop

    assert asyncio.run(run()).exit_status == 143
    assert capsys.readouterr().out == (
        "Google Cloud is about to stop this host (maintenance-event: "
        "TERMINATE_ON_HOST_MAINTENANCE); stopping\n"
    )
    (entry,) = folder.events("stop_notice")
    assert (entry["key"], entry["value"]) == (
        "maintenance-event",
        "TERMINATE_ON_HOST_MAINTENANCE",
    )
    folder.close()
