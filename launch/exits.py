"""Exit statuses, and commands that first prepare and then run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

T = TypeVar("T")


def exit_status(prepare: Callable[[], T], run: Callable[[T], int]) -> int:
    """What `run` returns of what `prepare` returns; 130 after Ctrl-C.

    What `prepare` refuses is the user's mistake: it is told, and the status is 2. What goes wrong
    later is not, and is raised.
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
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
