"""Exit statuses, and commands that first prepare and then run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

T = TypeVar("T")


class Failure(Exception):  # noqa: N818  # the word of its exit status
    """What ended a command is neither the user's mistake nor in need of a traceback."""


def exit_status(prepare: Callable[[], T], run: Callable[[T], int]) -> int:
    """What `run` returns of what `prepare` returns; 130 after Ctrl-C.

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
