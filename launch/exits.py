"""Exit statuses of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

T = TypeVar("T")


class Failure(Exception):  # noqa: N818  # named after EXIT_FAILED
    """A command failed for a known reason: no mistake of the user, no traceback needed."""


def exit_status(prepare: Callable[[], T], run: Callable[[T], int]) -> int:
    """Prepares and runs a command; returns its exit status, 130 after Ctrl-C.

    A `ValueError` or `FileNotFoundError` of `prepare` is the user's mistake: it is printed, and the
    status is 2. A `Failure` of `run` is printed, and the status is 1. Other errors are raised.
    """
    try:
        prepared = prepare()
    except (ValueError, FileNotFoundError) as mistake:
        print(mistake, file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    try:
        return run(prepared)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
