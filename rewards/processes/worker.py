"""A reward process: loads one reward function and scores completions until its host is gone.

`process.py` starts it as `run(FD)` with a connected socket FD. The host sends pickles: the
settings, then lists of numbered inputs. The process answers with lines of JSON, because what a
user's code can write must not be unpickled:

    {"ready": {"kind", "needs_answer", "columns", "sha256"}} or {"refused": MESSAGE}
    [NUMBER, VALUE, [CAUSE, MESSAGE] or null, {NAME: NUMBER}, TRACEBACK]      a score

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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

from rewards.base import Outcome, RewardInput
from rewards.forms import Form, recognise
from rewards.processes.parent import end_with_parent
from rewards.resolve import resolve, source_sha256

_LONGEST_TRACE = 20_000
_FILE_BYTES = 2**30
"""Largest file that the process can write."""


@dataclass(frozen=True)
class Settings:
    """What a process is started with: the configured function, and limits of a call and memory."""

    function: str
    args: Mapping[str, object]
    timeout_s: float
    memory_bytes: int


def run(descriptor: int) -> None:
    """Runs the process until its host is gone; does not return."""
    with contextlib.suppress(BrokenPipeError, EOFError):  # the host is gone
        _run(socket.socket(fileno=descriptor))
    os._exit(0)  # threads of the function may still run


def _run(channel: socket.socket) -> None:
    _keep_from_children(channel)
    messages = channel.makefile("rb")
    settings: Settings = pickle.load(messages)
    _limit(settings)
    try:
        form = recognise(resolve(settings.function), settings.args)
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
        asyncio.run(_serve_async(channel, messages, form, settings.timeout_s))
    while True:
        numbers, inputs = zip(*pickle.load(messages), strict=True)
        for index, outcome, trace in form.score(inputs):
            _send_score(channel, numbers[index], outcome, trace)


async def _serve_async(
    channel: socket.socket, messages: BinaryIO, form: Form, timeout_s: float
) -> None:
    async def score(number: int, one: RewardInput) -> None:
        try:
            outcome, trace = await form.score_one(one, timeout_s=timeout_s)
        except TimeoutError:
            outcome, trace = Outcome.failed("timed_out", f"took longer than {timeout_s:g} s"), ""
        _send_score(channel, number, outcome, trace)

    loop, running = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    reader = ThreadPoolExecutor(1)  # the function may fill the loop's own threads
    while True:
        for number, one in await loop.run_in_executor(reader, pickle.load, messages):
            task = asyncio.create_task(score(number, one))
            running.add(task)
            task.add_done_callback(running.discard)


def _send_score(channel: socket.socket, number: int, outcome: Outcome, trace: str) -> None:
    error = outcome.error
    shown = None if error is None else [error.cause, error.message]
    _send(channel, [number, outcome.value, shown, dict(outcome.named), trace[-_LONGEST_TRACE:]])


def _send(channel: socket.socket, answer: object) -> None:
    channel.sendall(json.dumps(answer).encode() + b"\n")


def _keep_from_children(channel: socket.socket) -> None:
    """Lets the connection end with this process, also if what it has started lives on."""
    channel.set_inheritable(False)
    left = [channel.fileno()]

    def close() -> None:
        while left:  # once: in a child of a child the number can be another file's
            os.close(left.pop())

    os.register_at_fork(after_in_child=close)


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
