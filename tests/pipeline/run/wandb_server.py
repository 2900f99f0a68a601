"""A fake W&B server on the loopback interface that hangs on request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer(ThreadingHTTPServer):
    """Stores the uploads of a run.

    Attributes:
        hangs: whether requests get no answer from now on.
        history: lines of the run's history by their number.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hangs = False
        self.history: dict[int, str] = {}
        self.healed = threading.Event()

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def rows(self) -> list[dict[str, Any]]:
        """The run's history, in the order in which W&B shows it."""
        return [json.loads(line) for _, line in sorted(self.history.items())]

    def steps(self) -> list[int]:
        """Steps that have data."""
        return [row["_step"] for row in self.rows()]

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignored: clients may disconnect at any time."""

    def answer(self, operation: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The response data of a GraphQL operation."""
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "somebody"}}
        bucket: dict[str, Any] = {
            "id": "r",
            "name": given.get("name"),
            "displayName": "run",
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps([line for _, line in sorted(self.history.items())][-1:]),
            "eventsTail": "[]",
            "summaryMetrics": "{}",
            "config": "{}",
            "wandbConfig": '{"t": {}}',
            "tags": [],
            "project": project,
        }
        if operation == "RunResumeStatus":
            return {"model": {**project, "bucket": bucket if self.history else None}}
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": bucket, "inserted": not self.history}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in given["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def stream(self, sent: Mapping[str, Any]) -> None:
        """Stores the content of a file-stream request."""
        part = sent.get("files", {}).get("wandb-history.jsonl")
        for number, line in enumerate(part["content"] if part else ()):
            self.history[part["offset"] + number] = line


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, *_: object) -> None:
        """Logs nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.hangs:
            self.server.healed.wait()
            self.close_connection = True
        elif self.path == "/graphql":
            asked = json.loads(body)
            data = self.server.answer(asked["operationName"], asked.get("variables") or {})
            self._reply({"data": data})
        else:
            if self.path.endswith("file_stream"):
                self.server.stream(json.loads(body))
            self._reply({})

    do_GET = do_POST = do_PUT = _answer  # noqa: N815  # names of http.server

    def _reply(self, answer: Mapping[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """A running server for the duration of the block."""
    with WandbServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.healed.set()
        server.shutdown()
