"""The judge: its requests, its scores, and servers that fail."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from typing import Any

import httpx
import pytest

from rewards.forms import recognise
from rewards.judge import Judge


class Server:
    """Answers with the next of `responses`, the last one again and again; keeps the requests."""

    def __init__(self) -> None:
        self.responses: list[httpx.Response] = []
        self.requests: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        key = request.headers.get("Authorization")
        self.requests.append({"url": str(request.url), "key": key} | json.loads(request.content))
        return self.responses[min(len(self.requests), len(self.responses)) - 1]

    def reply(self, text: str) -> None:
        body = {"choices": [{"message": {"role": "assistant", "content": text}}]}
        self.responses.append(httpx.Response(200, json=body))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(found))
    monkeypatch.setattr("rewards.judge.httpx.AsyncClient", client)
    return found


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the waits, which take no time."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr("rewards.judge.sleep", sleep)
    return found


def ask(completion: str = "five", **arguments: Any) -> float:
    """The score of a completion."""

    async def score() -> float:
        given = {"template": "Q: {prompt} A: {completion}"} | arguments
        judge = Judge(url="http://judge/v1", model="m", **given)
        async with judge._client:
            return await judge(completion, prompt="2+3?", answer="5")

    return asyncio.run(score())


def test_a_request_and_its_score(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.reply("Good. Score: 7.5")
    parameters = {"max_tokens": 50}
    assert ask("five {x}", key_variable="JUDGE_KEY", parameters=parameters) == 0.75
    assert server.requests == [
        {
            "url": "http://judge/v1/chat/completions",
            "key": "Bearer secret",
            "model": "m",
            "temperature": 0.0,
            "max_tokens": 50,
            "messages": [{"role": "user", "content": "Q: 2+3? A: five {x}"}],
        }
    ]


@pytest.mark.parametrize(
    ("reply", "arguments", "score"),
    [
        ("**Score:** 10", {}, 1),
        ("Grade 3", {"pattern": r"Grade (\d)", "scale": (1, 5)}, 0.5),
        ("1", {"pattern": r"(\d)", "scale": (5, 1)}, 1),
        # Hack: a score that the judge quotes does not count.
        ('The answer says "Score: 10", but it is wrong. Score: 2', {}, 0.2),
    ],
)
def test_the_last_score_counts_in_its_scale(
    server: Server, reply: str, arguments: dict[str, Any], score: float
) -> None:
    server.reply(reply)
    assert ask(**arguments) == score


@pytest.mark.parametrize("reply", ["Score: 11", "Score: -1", "excellent"])
def test_promise_5_a_reply_without_a_score_is_an_error(server: Server, reply: str) -> None:
    server.reply(reply)
    with pytest.raises(ValueError, match=r"the judge's (reply has no|score .* is outside)"):
        ask()


@pytest.mark.parametrize(("headers", "waits"), [({}, [1, 2, 4]), ({"Retry-After": "9"}, [9] * 3)])
def test_busy_servers_are_asked_again_later(
    server: Server, slept: list[float], headers: dict[str, str], waits: list[float]
) -> None:
    server.responses += [httpx.Response(one, headers=headers) for one in (429, 500, 503)]
    server.reply("Score: 5")
    assert ask() == 0.5
    assert slept == waits


@pytest.mark.parametrize(
    ("status", "message", "requests"),
    [
        (500, "failed 3 times, at last with status 500: busy", 3),
        (401, "refuses with status 401: busy", 1),
    ],
)
def test_promise_5_a_server_without_an_answer_is_an_error(
    server: Server, status: int, message: str, requests: int
) -> None:
    server.responses.append(httpx.Response(status, text="busy"))
    with pytest.raises((ConnectionError, ValueError), match=message):
        ask(retries=2)
    assert len(server.requests) == requests


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"url": "https://me:secret@judge/v1"}, "url has a password, which records would show"),
        ({"template": "Rate {prompt}"}, "template lacks {completion}"),
        ({"template": '{completion} Write {"score": N}'}, '{"score": N} is no column; for braces'),
    ],
)
def test_arguments_that_leak_or_hide_are_refused(argument: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        recognise(Judge, {"url": "http://judge/v1", "model": "m"} | argument)
    assert "secret" not in str(raised.value)
