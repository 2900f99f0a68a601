"""What a process writes to its log: a line for each piece of work, when it has ended.

Ray keeps the log of each process; docs/operations.md says where to read it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from rewards.processes.parent import end_with_parent

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

LOG = logging.getLogger("actors")


class _StandardOutput(logging.Handler):
    """Writes to what `sys.stdout` is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        sys.stdout.write(self.format(record) + "\n")
        sys.stdout.flush()


def begin_process() -> None:
    """Makes this process die with Ray's, and write its log to standard output, in UTC."""
    end_with_parent()
    if LOG.handlers:
        return
    handler, form = _StandardOutput(), logging.Formatter("%(asctime)s %(message)s")
    form.converter = time.gmtime
    form.default_time_format, form.default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"
    handler.setFormatter(form)
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False  # Ray's own handler would write the line again


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
        why = f"{type(error).__name__}: {error}"
        LOG.log(logging.ERROR, "%s failed after %.2f s: %s", name, time.monotonic() - began, why)
        raise
    LOG.info("%s in %.2f s", done, time.monotonic() - began)


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
