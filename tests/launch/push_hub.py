"""A local Hugging Face hub that takes pushes as the real one does, by LFS; it keeps them in memory.

It is no Xet storage: a client uses it with HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

OLD_HTTPX = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
"""Mark of tests that upload: the hub's client calls httpx in its older way."""
LOGIN = {
    "type": "user",
    "name": "ann",
    "orgs": [{"type": "org", "name": "lab"}],
    "auth": {"type": "access_token", "accessToken": {"displayName": "push", "role": "write"}},
}
_LARGE = (".safetensors", ".model")
"""Endings of files that the hub stores by LFS, as in `.gitattributes` of a new repository."""


@dataclass
class Repo:
    """A repository: what it was made with, its files, and the titles of its commits."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class PushHub:
    """A running hub.

    Attributes:
        url: for HF_ENDPOINT.
        login: answer to `whoami-v2`; a number: a status instead.
        repos: by name.
        stored: contents by their hash, whether they are part of a commit or not.
        uploads: lengths of the uploaded contents in their order.
        uploads_left: uploads until the connection breaks, in the middle of the next one; from then
            on no request is answered. None: it does not break.
    """

    url: str = ""
    login: Mapping[str, Any] | int = field(default_factory=lambda: LOGIN)
    repos: dict[str, Repo] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    uploads: list[int] = field(default_factory=list)
    uploads_left: int | None = None

    @property
    def is_broken(self) -> bool:
        """Whether no request is answered."""
        return self.uploads_left is not None and self.uploads_left < 0

    def breaks(self) -> bool:
        """Counts an upload that begins; returns whether the connection breaks in it."""
        if self.uploads_left is not None:
            self.uploads_left -= 1
        return self.is_broken


def use(hub: PushHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the client talk to a hub, with a login, without Xet or pauses before retries."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/no-login")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    at_once = SimpleNamespace(sleep=lambda _: None)
    monkeypatch.setattr("huggingface_hub.utils._http.time", at_once)


@contextmanager
def push_hub() -> Iterator[PushHub]:
    """Runs a hub on this machine."""
    hub = PushHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: PushHub

    def do_GET(self) -> None:  # of the base class
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        if self.state.is_broken:
            self.close_connection = True
            return
        path, length = self.path.partition("?")[0], int(self.headers.get("Content-Length", 0))
        if self.command == "PUT" and self.state.breaks():
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        asked = f"{self.command} {path}"
        for pattern, answer in _ROUTES.items():
            if match := re.fullmatch(pattern, asked):
                self._send(*answer(self.state, body, **match.groupdict()))
                break
        else:
            self._send(404, {"error": f"no route for {asked}"})

    def _send(self, status: int, found: Any) -> None:
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


_Answer = tuple[int, Any]
_Route = Callable[..., _Answer]


def _whoami(hub: PushHub, _: bytes) -> _Answer:
    if isinstance(hub.login, int):
        return hub.login, {"error": "Invalid credentials"}
    return 200, hub.login


def _create(hub: PushHub, body: bytes) -> _Answer:
    asked = json.loads(body)
    name = f"{asked['organization']}/{asked['name']}"
    if name in hub.repos:
        return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
    private = asked["visibility"] == "private"
    hub.repos[name] = Repo(private, {".gitattributes": b"*.model filter=lfs\n"})
    return 200, {"url": f"{hub.url}/{name}", "name": name}


def _info(hub: PushHub, _: bytes, name: str) -> _Answer:
    if name not in hub.repos:
        return 404, {"error": "Repository not found"}
    return 200, {"id": name, "private": hub.repos[name].private, "sha": "0" * 40, "siblings": []}


def _tree(hub: PushHub, _: bytes, name: str) -> _Answer:
    return 200, [_entry(path, content) for path, content in hub.repos[name].files.items()]


def _entry(path: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry = {"type": "file", "path": path, "size": len(content), "oid": oid}
    if path.endswith(_LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
    return entry


def _preupload(hub: PushHub, body: bytes, name: str) -> _Answer:
    files = []
    for file in json.loads(body)["files"]:
        mode = "lfs" if file["path"].endswith(_LARGE) else "regular"
        there = hub.repos[name].files.get(file["path"])
        entry = {} if there is None else _entry(file["path"], there)
        oid = entry.get("lfs", entry).get("oid")
        found = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
        files.append(found)
    return 200, {"files": files}


def _batch(hub: PushHub, body: bytes, name: str) -> _Answer:
    objects = []
    for one in json.loads(body)["objects"]:
        actions = {
            "upload": {"href": f"{hub.url}/storage/{one['oid']}"},
            "verify": {"href": f"{hub.url}/{name}.git/info/lfs/verify"},
        }
        objects.append(one if one["oid"] in hub.stored else {**one, "actions": actions})
    return 200, {"transfer": "basic", "objects": objects}


def _store(hub: PushHub, body: bytes, oid: str) -> _Answer:
    if hashlib.sha256(body).hexdigest() != oid:
        return 400, {"error": "content and hash differ"}
    hub.stored[oid] = body
    hub.uploads.append(len(body))
    return 200, {}


def _verify(hub: PushHub, body: bytes, name: str) -> _Answer:
    asked = json.loads(body)
    return (200 if len(hub.stored.get(asked["oid"], b"")) == asked["size"] else 404), {}


def _commit(hub: PushHub, body: bytes, name: str) -> _Answer:
    repo = hub.repos[name]
    for line in body.splitlines():
        item = json.loads(line)
        kind, value = item["key"], item["value"]
        if kind == "header":
            repo.commits.append(value["summary"])
        elif kind == "deletedFile":
            del repo.files[value["path"]]
        else:
            content = (
                hub.stored[value["oid"]]
                if kind == "lfsFile"
                else base64.b64decode(value["content"])
            )
            repo.files[value["path"]] = content
    oid = hashlib.sha1(body).hexdigest()
    return 200, {"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid}


_NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
_ROUTES: dict[str, _Route] = {
    "GET /api/whoami-v2": _whoami,
    "POST /api/repos/create": _create,
    f"GET /api/models/{_NAME}(/revision/main)?": _info,
    rf"GET /api/models/{_NAME}/tree/\w+": _tree,
    "POST /api/validate-yaml": lambda *_: (200, {"errors": [], "warnings": []}),
    f"POST /api/models/{_NAME}/preupload/main": _preupload,
    rf"POST /{_NAME}\.git/info/lfs/objects/batch": _batch,
    r"PUT /storage/(?P<oid>\w+)": _store,
    rf"POST /{_NAME}\.git/info/lfs/verify": _verify,
    f"POST /api/models/{_NAME}/commit/main": _commit,
}
"""What answers which request."""
