"""The largest memory of the processes that a command starts."""

from __future__ import annotations

import threading
from contextlib import suppress

import psutil

_SAMPLE_EVERY_S = 2.0
"""Each reading costs the kernel some time."""


class PeakMemory:
    """Watches the descendants of this process while its block runs.

    Attributes:
        bytes: the largest summed proportional set size, which counts shared memory once.
    """

    def __enter__(self) -> PeakMemory:
        self.bytes, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_EVERY_S):
            self.bytes = max(self.bytes, _descendants_bytes())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _descendants_bytes() -> int:
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total
