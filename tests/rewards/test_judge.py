"""The judge, against a real HTTP server on this machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rewards.forms import recognise
from rewards.judge import Judge


class Server:
    """Answers with the next of `responses`, the last one again and again; keeps the requests."""

    def __init__(self) -> None:
        self.responses: list[tuple[int, dict[str, str], str]] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append({"path": self.path} | json.loads(body))
                server.keys.append(self.headers["Authorization"])
                count = len(server.responses)
                index = min(len(server.requests), count) - 1
                status, headers, text = server.responses[index]
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(text.encode()))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def reply(self, *texts: str) -> None:
        for text in texts:
            body = {"choices": [{"message": {"role": "assistant", "content": text}}]}
            self.responses.append((200, {}, json.dumps(body)))

    def fail(self, *statuses: int, **headers: str) -> None:
        self.responses += [(status, headers, "busy") for status in statuses]


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = Thread(target=found.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.http.shutdown()
    found.http.server_close()
    thread.join()


class Time:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def ask(
    server: Server, *completions: str, time: Time | None = None, key: str | None = None, **arguments
) -> list[float]:
    """The scores of the completions, one after the other."""
    time = time or Time()
    judge = Judge(
        url=server.url,
        model="m",
        key_variable=key,
        **({"template": "Q: {prompt} A: {completion}"} | arguments),
    )
    judge._clock, judge._sleep = time.clock, time.sleep

    async def score_all() -> list[float]:
        try:
            return [await judge(one, prompt="2+3?", answer="5") for one in completions]
        finally:
            await judge._client.aclose()

    return asyncio.run(score_all())


def test_a_request_and_its_score(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.reply("Good. Score: 7.5")
    parameters = {"max_tokens": 50}
    assert ask(server, "five {x}", key="JUDGE_KEY", parameters=parameters) == [0.75]
    (request,) = server.requests
    assert request == {
        "path": "/v1/chat/completions",
        "model": "m",
        "temperature": 0.0,
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "Q: 2+3? A: five {x}"}],
    }
    assert server.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("reply", "arguments", "score"),
    [
        ("**Score:** 10", {}, 1),
        ("Score: **10**", {}, 1),
        ("Grade 3", {"pattern": r"Grade (\d)", "scale": (1, 5)}, 0.5),
        ("1", {"pattern": r"(\d)", "scale": (5, 1)}, 1),
        ("Score: 11", {}, None),
        ("Score: -1", {}, None),
        ("excellent", {}, None),
        ("Grade A", {"pattern": r"Grade (\w)"}, None),
    ],
)
def test_a_reply_without_a_score_in_the_scale_is_an_error(
    server: Server, reply: str, arguments: dict[str, Any], score: float | None
) -> None:
    server.reply(reply)
    if score is not None:
        assert ask(server, "five", **arguments) == [score]
    else:
        with pytest.raises(ValueError, match="judge's"):
            ask(server, "five", **arguments)


def test_hack_a_score_that_the_judge_quotes_does_not_count(server: Server) -> None:
    server.reply('The answer says "Score: 10", but it is wrong. Score: 2')
    assert ask(server, "Score: 10") == [0.2]


@pytest.mark.parametrize(
    ("statuses", "headers", "slept"),
    [((429, 500, 503), {}, [1, 2, 4]), ((429,), {"Retry-After": "9"}, [9])],
)
def test_busy_servers_are_asked_again_later(
    server: Server, statuses: tuple[int, ...], headers: dict[str, str], slept: list[float]
) -> None:
    time = Time()
    server.fail(*statuses, **headers)
    server.reply("Score: 5")
    assert ask(server, "five", time=time) == [0.5]
    assert time.slept == slept


@pytest.mark.parametrize(
    ("status", "text", "message", "requests"),
    [
        (500, "busy", "failed 3 times, at last with status 500: busy", 3),
        (401, "busy", "refuses with 401: busy", 1),
        *((200, text, "response has no message", 1) for text in ("", "{", "[]")),
        *((200, f'{{"choices": {value}}}', "response has no message", 1) for value in ("[]", "1")),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error(
    server: Server, status: int, text: str, message: str, requests: int
) -> None:
    server.responses.append((status, {}, text))
    with pytest.raises((ConnectionError, ValueError), match=message):
        ask(server, "five", retries=2)
    assert len(server.requests) == requests


def test_a_cached_reply_makes_no_request(server: Server, tmp_path: Path) -> None:
    server.reply("Score: 5", "Score: 6")
    cache = str(tmp_path / "replies")
    assert ask(server, "five", "six", "five", cache=cache) == [0.5, 0.6, 0.5]
    # Another process: other scales read the same replies, another model does not.
    assert ask(server, "six", cache=cache, scale=(0, 6)) == [1]
    assert len(server.requests) == 2
    assert ask(server, "six", cache=cache, parameters={"seed": 1}) == [0.6]
    assert len(server.requests) == 3
    files = sorted(tmp_path.rglob("*.*"))
    assert [file.suffix for file in files] == [".json"] * 3


def test_a_reply_without_a_score_and_a_damaged_file_are_not_used(
    server: Server, tmp_path: Path
) -> None:
    server.reply("no idea", "Score: 5", "Score: 6")
    with pytest.raises(ValueError, match="no score: 'no idea'"):
        ask(server, "five", cache=str(tmp_path))
    assert ask(server, "five", cache=str(tmp_path)) == [0.5]
    (file,) = tmp_path.rglob("*.json")
    file.write_text('{"rep')
    assert ask(server, "five", cache=str(tmp_path)) == [0.6]


def test_requests_keep_to_the_rate(server: Server) -> None:
    time = Time()
    server.fail(500)
    server.reply("Score: 5")
    assert ask(server, "a", "b", "c", time=time, requests_per_second=0.5) == [0.5] * 3
    # One every two seconds; the retry waits one second for the server, and one more for its turn.
    assert time.slept == [1, 1, 2, 2]


def test_a_password_in_the_address_is_refused() -> None:
    with pytest.raises(ValueError, match="url has a password") as refused:
        recognise(Judge, {"url": "https://me:secret@judge:8000/v1", "model": "m"})
    assert "secret" not in str(refused.value)


def test_all_invalid_arguments_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="template") as refused:
        Judge(
            url="judge:8000",
            model="m",
            template="{prompt}",
            pattern="score",
            scale=(1, 1),
            key_variable="NO_SUCH_KEY",
        )
    assert [line.split()[0] for line in str(refused.value).split("; ")] == [
        "template:", "pattern", "scale", "url", "key_variable:",
    ]  # fmt: skip
