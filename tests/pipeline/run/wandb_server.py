"""A fake W&B server on the loopback interface that fails on request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["hang", "500", "403"]


class WandbServer(ThreadingHTTPServer):
    """Stores the uploads of a run.

    Attributes:
        fault: how requests fail from now on; None: they succeed.
        history: lines of the run's history by their number.
        summary: of the run.
        alerts: severity, title and text of each alert.
        artifacts: type and name of each artifact.
        exit_status: of the run, once it has ended.
        complete: set when the run has ended.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fault: Fault | None = None
        self.history: dict[int, str] = {}
        self.summary: dict[str, Any] = {}
        self.alerts: list[tuple[str, str, str]] = []
        self.artifacts: list[tuple[str, str]] = []
        self.exit_status: int | None = None
        self.complete = threading.Event()
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
            "summaryMetrics": json.dumps(self.summary),
            "config": "{}",
            "wandbConfig": '{"t": {}}',
            "tags": [],
            "project": project,
        }
        if operation == "RunResumeStatus":
            return {"model": {**project, "bucket": bucket if self.history else None}}
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": bucket, "inserted": not self.history}}
        if operation == "NotifyScriptableRunAlert":
            self.alerts.append((given["severity"], given["title"], given["text"]))
            return {"notifyScriptableRunAlert": {"success": True}}
        if operation == "CreateArtifact":
            given = given["input"]
            name, digest = given["artifactCollectionName"], given["digest"]
            self.artifacts.append((given["artifactTypeName"], name))
            # A committed artifact has all of its files.
            artifact = {"id": digest, "state": "COMMITTED", "artifactSequence": {"id": name}}
            return {"createArtifact": {"artifact": artifact}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in given["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def stream(self, sent: Mapping[str, Any]) -> None:
        """Stores the content of a file-stream request."""
        part = sent.get("files", {}).get("wandb-history.jsonl")
        for number, line in enumerate(part["content"] if part else ()):
            self.history[part["offset"] + number] = line
        if summary := sent.get("files", {}).get("wandb-summary.json"):
            self.summary = json.loads(summary["content"][-1])
        if sent.get("complete"):
            self.exit_status = sent["exitcode"]
            self.complete.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, *_: object) -> None:
        """Logs nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.fault == "hang":
            self.server.healed.wait()
            self.close_connection = True
        elif self.server.fault is not None:
            self._reply({"error": "out of order"}, status=int(self.server.fault))
        elif self.path == "/graphql":
            asked = json.loads(body)
            data = self.server.answer(asked["operationName"], asked.get("variables") or {})
            self._reply({"data": data})
        else:
            if self.path.endswith("file_stream"):
                self.server.stream(json.loads(body))
            self._reply({})

    do_GET = do_POST = do_PUT = _answer  # noqa: N815  # names of http.server

    def _reply(self, answer: Mapping[str, Any], *, status: int = 200) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
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
