"""Lets a process die with the one that started it, even one that is stopped or hangs (Linux)."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: a child process must not do that between fork and exec


def end_with_parent() -> None:
    """Makes Linux kill this process when the thread that started it is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
