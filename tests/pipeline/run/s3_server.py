"""A local S3 server that can be made slow, full or gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server
from werkzeug.wrappers import Response

BUCKET = "bucket"


class S3Server:
    """A server of one empty bucket.

    Attributes:
        writable: whether writing succeeds; else the server answers that its disk is full.
        on_write: called before each write.
    """

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self.writable = True
        self.on_write: Callable[[str], None] = lambda _: None
        self._server: BaseWSGIServer
        self.port = 0
        self.start()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] in {"PUT", "POST"} and path.count("/") > 1:
            self.on_write(path)
            if not self.writable:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                return Response("full", status=507)(environ, start_response)
        return self._app(environ, start_response)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listens, at the same port as before."""
        self._server = make_server("127.0.0.1", self.port, self, threaded=True)
        self.port = self._server.port
        # An end is noticed at the next poll.
        threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()

    def stop(self) -> None:
        """Refuses connections; the content stays."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Runs a server, which s3:// of this process and its children uses."""
    import fsspec
    from moto.backends import get_backend

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3Server()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": server.url,
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fsspec.url_to_fs("s3://")[0].mkdir(BUCKET)
    try:
        yield server
    finally:
        server.stop()
        for backend in get_backend("s3").values():
            for one in backend.values():
                one.reset()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
