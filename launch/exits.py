"""Exit statuses of commands, and the errors that lead to them."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import TextIOWrapper
from typing import TextIO

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_DIED = 69
"""Of a run's process, to its parent: one of the run's processes died."""
EXIT_REPORTED = 70
"""Of a run's process, to its parent: it has said why it failed; Ray ends processes with 1."""
EXIT_CLUSTER_LOST = 75
"""The cluster of a submitted job is gone (`EX_TEMPFAIL` of sysexits.h): submit the job again."""
EXIT_INTERRUPTED = 130
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}


class Failure(Exception):  # noqa: N818  # named after EXIT_FAILED
    """A command ended early for a known reason: no traceback is needed.

    Attributes:
        status: exit status of the command.
    """

    def __init__(self, why: object, status: int = EXIT_FAILED) -> None:
        super().__init__(str(why))
        self.status = status


def say(text: object, *, file: TextIO | None = None) -> None:
    """Prints a line to `file`, stdout by default; a lost terminal does not end the command."""
    with suppress(OSError):
        print(text, file=file, flush=True)


def disk_problem(error: BaseException) -> str | None:
    """What to do about a file that could not be written; None for another error."""
    if not isinstance(error, OSError) or error.errno not in _DISK:
        return None
    return (
        f"{error.filename or 'a file'} cannot be written: {error.strerror}; what was written "
        "before is valid: make space, or repair the disk, and give the same command again"
    )


def exit_status(command: Callable[[], int]) -> int:
    """Runs a command; returns its exit status, 130 after Ctrl-C.

    A `ValueError` or `FileNotFoundError` is the user's mistake: it is printed, and the status is 2.
    A `Failure` is printed, and has its own status; a full or broken disk is printed, with status 1.
    Other errors are raised. What the terminal's encoding does not have is escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not what tests capture
            stream.reconfigure(errors="backslashreplace")
    try:
        return command()
    except Failure as failure:
        told, status = str(failure), failure.status
    except (ValueError, FileNotFoundError) as mistake:
        told, status = str(mistake), EXIT_MISTAKE
    except OSError as error:
        if (problem := disk_problem(error)) is None:
            raise
        told, status = problem, EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    with suppress(OSError):  # the terminal is gone
        sys.stdout.flush()
    say(told, file=sys.stderr)
    return status


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines as they are found, until the reader of a pipe closes it."""
    try:
        for line in lines:
            print(line)
    except BrokenPipeError:
        sys.stderr.close()
