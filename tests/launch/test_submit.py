"""Submission of a job: what a cluster refuses, as one sentence; the files of the user in it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from launch import source, submit
from launch.exits import Failure
from launch.source import copy_user_files
from rewards.resolve import uploaded

VERSION = json.dumps({"version": "4", "ray_version": "2.60.0"})
NO_AGENT = "No available agent to submit job, please try again later."
TRACEBACK = "Traceback (most recent call last):\n  File a.py\nValueError: the package is too large"


class Dashboard(BaseHTTPRequestHandler):
    """What Ray's dashboard answers, as recorded: the token that it asks for, and to a job."""

    token: str | None = None
    refusal = ""

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        if self.token is not None and given != f"Bearer {self.token}":
            self._answer(403 if given else 401, "Unauthorized")
        else:
            self._answer(200, VERSION)

    def do_POST(self) -> None:
        self._answer(500, self.refusal)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of a dashboard; this user has no token."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(Dashboard, "token", None)
    server = HTTPServer(("127.0.0.1", 0), Dashboard)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def refusal(address: str, *, without_token: bool = False) -> str:
    """The sentence with which a job is refused."""
    with pytest.raises((Failure, ValueError)) as refused, submit.one_sentence(address):
        submit.connect(address, without_token=without_token).submit_job(entrypoint="true")
    return str(refused.value).replace(address, "ADDRESS")


def test_what_a_cluster_refuses_is_one_sentence_with_the_remedy(
    address: str, monkeypatch: pytest.MonkeyPatch
):
    assert refusal(address).startswith("the cluster at ADDRESS has no token: everybody who can")
    for answer, told in (
        (TRACEBACK, "Request failed with status code 500: Traceback (most rec"),
        ("busy", "Request failed with status code 500: busy."),
        (NO_AGENT, f"Request failed with status code 500: {NO_AGENT}."),
    ):
        monkeypatch.setattr(Dashboard, "refusal", answer)
        found = refusal(address, without_token=True)
        assert found.startswith(f"the cluster at ADDRESS refuses the job: {told}")
        assert "\n" not in found
        assert ("--dashboard-agent-listen-port 0" in found) == (answer == NO_AGENT)
    with pytest.raises(Failure, match="the job: RuntimeError"), submit.one_sentence(address):
        raise RuntimeError
    monkeypatch.setattr(Dashboard, "token", "secret")
    assert refusal(address).startswith("the cluster at ADDRESS refuses the token of this command")
    nobody = refusal("http://127.0.0.1:1")
    assert nobody.startswith("no Ray cluster answers at ADDRESS; start one with: ray get-auth-toke")


def test_a_token_is_sent_where_there_is_one_and_only_its_owner_reads_it(
    address: str, tmp_path: Path
):
    submit.use_token()
    assert "RAY_AUTH_MODE" not in os.environ
    (tmp_path / ".ray").mkdir()
    token = tmp_path / ".ray/auth_token"
    token.write_text("secret")
    token.chmod(0o644)
    submit.use_token()
    assert os.environ.pop("RAY_AUTH_MODE") == "token"
    assert token.stat().st_mode & 0o777 == 0o600


# --- the user's files in the upload


FILES = {
    "my_rewards.py": "import helpers\nfrom rewards.base import score\n",
    "helpers.py": "def late():\n    import lazy.inner.deep\n",
    "lazy/inner/deep.py": "def broken(:\n",
    "words.txt": "not a module",
    "rewards.py": "",  # never imported: the project has a package of this name
    "rewards/mine.py": "",
    ".venv/lib/site-packages/numpy/__init__.py": "",
    "env/pyvenv.cfg": "",
    "env/lib/numpy/__init__.py": "",
    "other/own.py": "import near_it, helpers\n",
    "other/parts/one.py": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def copies(folder: Path, *functions: str) -> set[str]:
    root = folder / ".upload"
    shutil.rmtree(root, ignore_errors=True)
    copy_user_files(functions, folder, root)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


HERE = {"helpers.py", "lazy/inner/deep.py", "my_rewards.py", "other/own.py", "other/parts/one.py"}


def test_the_python_files_of_a_user_are_uploaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert copies(folder, "rewards.format:well_formed") == set()
    assert copies(folder, "my_rewards:near", "rewards.format:well_formed") == HERE
    # Those beside a reward file travel to their own folder.
    functions = [f"{folder}/other/own.py:f", f"{folder}/other/own.py:g", "/gone/gone.py:f"]
    own = uploaded(folder / "other", Path())
    assert copies(folder, *functions) == HERE | {f"{own}/own.py", f"{own}/parts/one.py"}
    monkeypatch.setattr(source, "_MOST_FILES", 4)
    with pytest.raises(ValueError, match="more than 4 Python files"):
        copies(folder, "my_rewards:near")
