"""A local Hugging Face hub that serves one folder as one model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class HubServer:
    """A running hub.

    Attributes:
        url: for HF_ENDPOINT.
        downloads: names of the files that were downloaded, in their order.
    """

    url: str
    downloads: list[str] = field(default_factory=list)


@contextmanager
def hub_server(name: str, folder: Path) -> Iterator[HubServer]:
    """Serves the files of `folder` as the model `name` on this machine."""
    downloads = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:  # of the base class
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            file = folder / path.rpartition("/")[2]
            if path.startswith(f"/api/models/{name}/tree/"):
                body = json.dumps([_entry(one) for one in sorted(folder.iterdir())]).encode()
            elif path.startswith(f"/api/models/{name}"):
                siblings = [{"rfilename": one.name} for one in sorted(folder.iterdir())]
                body = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            elif path.startswith(f"/{name}/resolve/") and file.is_file():
                body = file.read_bytes()
                if with_body:
                    downloads.append(file.name)
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield HubServer(f"http://127.0.0.1:{server.server_port}", downloads)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _entry(file: Path) -> dict[str, str | int]:
    oid = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": oid}
