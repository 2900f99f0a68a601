"""What a process writes to its log: a line for each piece of work, when it has ended.

Ray keeps the log of each process; docs/operations.md says where to read it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def logged_work(name: str) -> Iterator[Callable[[str], None]]:
    """Writes a line with the duration of its block.

    Yields:
        Takes what was done, as soon as it is known; otherwise the line has the name.

    Args:
        name: of the work, for the line about its failure.
    """
    began, done = time.monotonic(), name

    def describe(what: str) -> None:
        nonlocal done
        done = what

    try:
        yield describe
    except BaseException as error:
        # Without the traceback, which the caller gets.
        spent_s = time.monotonic() - began
        _write(f"{name} failed after {spent_s:.2f} s: {type(error).__name__}: {error}")
        raise
    _write(f"{done} in {time.monotonic() - began:.2f} s")


def _write(line: str) -> None:
    stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    sys.stdout.write(f"{stamp} {line}\n")
    sys.stdout.flush()


def logs(
    what: Callable[[Any, Any], str],
) -> Callable[[Callable[Concatenate[A, P], T]], Callable[Concatenate[A, P], T]]:
    """Makes a method write a line.

    Args:
        what: describes what was done; takes the object and the result of the method.
    """

    def decorate(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[A, P], T]:
        @wraps(method)
        def run(self: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with logged_work(method.__name__) as describe:
                result = method(self, *args, **kwargs)
                describe(what(self, result))
                return result

        return run

    return decorate
