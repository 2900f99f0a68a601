"""A reward process: loads one reward function and scores completions until its host is gone.

`process.py` starts it as `run(FD)` with a connected socket FD. The host sends pickled messages,
each after its length (8 bytes, big-endian): first the settings, then lists of numbered inputs. The
process answers with lines of JSON, because what a user's code can write must not be unpickled:

    {"ready": {"kind", "needs_answer", "columns", "sha256"}} or {"refused": MESSAGE}
    [NUMBER, VALUE, [CAUSE, MESSAGE] or null, {NAME: NUMBER}, TRACEBACK]      a score
    [NUMBER, null, "timed_out", {}, ""]                                       an async time-out

The process is the leader of a session. It has limits of memory and file size, dies with its host,
and writes the stacks of its threads to its standard error when it crashes or is about to be ended
(SIGUSR1).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.base import Outcome, RewardInput
from rewards.forms import Form, recognise
from rewards.processes.parent import end_with_parent
from rewards.resolve import resolve, source_sha256

HEADER = 8
"""Bytes of a message's length."""
TIMED_OUT = "timed_out"
_LONGEST_TRACE = 20_000
_FILE_BYTES = 2**30
"""Largest file that the process can write."""


@dataclass(frozen=True)
class Settings:
    """What a process is started with.

    Attributes:
        function: as in the configuration.
        args: of the function or class.
        timeout_s: of a call.
        memory_bytes: limit of private memory.
        concurrency: inputs that an async function scores at a time.
    """

    function: str
    args: Mapping[str, object]
    timeout_s: float
    memory_bytes: int
    concurrency: int


Numbered = Sequence[tuple[int, RewardInput]]
"""Inputs with the numbers under which their outcomes are returned."""


def message(content: object) -> bytes:
    """A message from the host."""
    data = pickle.dumps(content)
    return len(data).to_bytes(HEADER, "big") + data


def run(descriptor: int) -> None:
    """Runs the process until its host is gone; does not return."""
    with contextlib.suppress(BrokenPipeError):  # the host is gone
        _run(socket.socket(fileno=descriptor))
    os._exit(0)  # threads of the function may still run


def _run(channel: socket.socket) -> None:
    channel.set_inheritable(False)
    settings = _receive(channel)
    assert isinstance(settings, Settings)
    _limit(settings)
    try:
        found = resolve(settings.function)
        form = recognise(found, settings.args)
    except ValueError as error:
        _send(channel, {"refused": " ".join(str(error).split())})
        return
    ready = {
        "kind": form.kind,
        "needs_answer": form.needs_answer,
        "columns": form.columns,
        "sha256": source_sha256(settings.function),
    }
    _send(channel, {"ready": ready})
    if form.kind == "async":
        asyncio.run(_serve_async(channel, form, settings))
    else:
        _serve(channel, form)


def _serve(channel: socket.socket, form: Form) -> None:
    for inputs in _messages(channel):
        numbers = [number for number, _ in inputs]
        for index, outcome, trace in form.score([one for _, one in inputs]):
            _send(channel, _line(numbers[index], outcome, trace))


async def _serve_async(channel: socket.socket, form: Form, settings: Settings) -> None:
    async def score(number: int, one: RewardInput) -> None:
        try:
            outcome, trace = await form.score_one(one, timeout_s=settings.timeout_s)
        except TimeoutError:
            line: list[object] = [number, None, TIMED_OUT, {}, ""]
        else:
            line = _line(number, outcome, trace)
        await asyncio.get_running_loop().sock_sendall(channel, _encoded(line))

    channel.setblocking(False)
    running: set[asyncio.Task[None]] = set()
    async for inputs in _async_messages(channel):
        for number, one in inputs:
            task = asyncio.create_task(score(number, one))
            running.add(task)
            task.add_done_callback(running.discard)


def _line(number: int, outcome: Outcome, trace: str) -> list[object]:
    error = outcome.error
    shown = None if error is None else [error.cause, error.message]
    return [number, outcome.value, shown, dict(outcome.named), trace[-_LONGEST_TRACE:]]


def _messages(channel: socket.socket) -> Iterator[Numbered]:
    """The host's messages, until it closes the connection."""
    with contextlib.suppress(EOFError):
        while True:
            yield _receive(channel)


async def _async_messages(channel: socket.socket) -> AsyncIterator[Numbered]:
    loop = asyncio.get_running_loop()

    async def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = await loop.sock_recv(channel, count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    with contextlib.suppress(EOFError):
        while True:
            size = int.from_bytes(await read(HEADER), "big")
            yield pickle.loads(await read(size))


def _receive(channel: socket.socket) -> Any:
    """The next message.

    Raises:
        EOFError: if the host has closed the connection.
    """
    return pickle.loads(_read(channel, int.from_bytes(_read(channel, HEADER), "big")))


def _read(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = channel.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _send(channel: socket.socket, answer: object) -> None:
    channel.sendall(_encoded(answer))


def _encoded(answer: object) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _limit(settings: Settings) -> None:
    """Sets the limits of the process, and how its end is reported."""
    end_with_parent()
    for kind, most in (
        (resource.RLIMIT_DATA, settings.memory_bytes),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, allowed))
    # A copy, in case the function closes or replaces the standard error.
    errors = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    faulthandler.enable(file=errors)
    faulthandler.register(signal.SIGUSR1, file=errors)
    # Ctrl-C ends the host, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
