"""The lease of a mirror: only the process that holds it writes there.

Stores have no common compare-and-swap, so a lease is written, and read back after a while. A
process that was overtaken notices at its next renewal, and before it publishes a manifest.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from pipeline.contracts.record_files import TIME_FORMAT
from pipeline.run.mirror_store import Store

RENEW_EVERY_S = 30.0
LAPSE_S = 300.0
"""Age at which another host may take a lease over."""
_SETTLE_S = 1.0
"""Pause between writing a lease and reading it back."""
_LOOK_EVERY_S = 5.0
"""Pause between two looks at the lease of a host that may be gone."""


class LeaseLostError(Exception):
    """Another process writes to the mirror."""


@dataclass(frozen=True)
class Holder:
    """A process that may hold a lease.

    Attributes:
        id: of the lease.
        host: name of its host.
        machine: what the host's processes share: kernel and process ids.
        pid: of the run's process.
        started_s: start of the process, in seconds since 1970.
    """

    id: str
    host: str
    machine: str
    pid: int
    started_s: float

    @staticmethod
    def here() -> Holder:
        """This process, with a new lease."""
        pid = os.getpid()
        started_s = psutil.Process(pid).create_time()
        return Holder(uuid.uuid4().hex, socket.gethostname(), _machine(), pid, started_s)

    @property
    def is_dead(self) -> bool:
        """Whether it is a process of this host that has ended."""
        if not self.machine or (self.host, self.machine) != (socket.gethostname(), _machine()):
            return False
        try:
            return psutil.Process(self.pid).create_time() != self.started_s
        except psutil.NoSuchProcess:
            return True


def _machine() -> str:
    """Boot and process namespace, where processes have one id each; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


class Lease:
    """The lease of a run's mirror.

    Args:
        store: of the run.
        holder: of this lease.
        now: reads the time of day in seconds since 1970.
        wait: sleeps for some seconds.
    """

    def __init__(
        self,
        store: Store,
        holder: Holder,
        *,
        now: Callable[[], float] = time.time,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store = store
        self._holder = holder
        self._now, self._wait = now, wait
        self._since = _stamp(now())

    def await_free(self, say: Callable[[str], None]) -> None:
        """Waits until the lease can be taken: a lease that is not renewed lapses.

        Args:
            say: shows a line while this waits.

        Raises:
            ValueError: if another process holds it.
        """
        first, waited_s = self._store.read_lease(), 0.0
        found = first
        while found is not None and not self._is_free(found) and waited_s < LAPSE_S:
            if found != first:
                raise ValueError(self._held_by(found))
            if not waited_s:
                until = f"waiting for another one until {_stamp(_lapses_s(found))}"
                say(f"run.mirror: {self._words(found)}; {until}")
            self._wait(_LOOK_EVERY_S)
            waited_s += _LOOK_EVERY_S
            found = self._store.read_lease()

    def acquire(self, say: Callable[[str], None]) -> None:
        """Takes the lease when it is free.

        Args:
            say: shows a line while this waits.

        Raises:
            ValueError: if another process holds it.
        """
        self.await_free(say)
        self._write()
        self._wait(_SETTLE_S)
        found = self._store.read_lease()
        if found is None or found["id"] != self._holder.id:
            raise ValueError(self._held_by(found or {}))

    def renew(self) -> None:
        """Renews the lease, or takes one that is free.

        Raises:
            LeaseLostError: if another process holds it.
        """
        found = self._store.read_lease()
        if found is not None and not self._is_free(found):
            raise LeaseLostError(self._words(found))
        self._write()

    def release(self) -> None:
        """Gives the lease back, if it is held."""
        found = self._store.read_lease()
        if found is not None and found["id"] == self._holder.id:
            self._store.delete_lease()

    def _write(self) -> None:
        value = {**asdict(self._holder), "since": self._since, "renewed_s": self._now()}
        self._store.write_lease(value)

    def _is_free(self, found: Mapping[str, Any]) -> bool:
        """Whether a lease is this one's, its process has died, or it has lapsed."""
        holder = _holder(found)
        return (
            holder is None
            or holder.id == self._holder.id
            or holder.is_dead
            or self._now() >= _lapses_s(found)
        )

    def _words(self, found: Mapping[str, Any]) -> str:
        if not found:
            return f"another process has just taken {self._store.url}"
        return (
            f"{self._store.url} is written by process {found['pid']} on host {found['host']} since "
            f"{found['since']}, last sign of life {_stamp(found['renewed_s'])}"
        )

    def _held_by(self, found: Mapping[str, Any]) -> str:
        return (
            f"run.mirror: {self._words(found)}; stop that run, or set another run.name or "
            "run.mirror"
        )


def _holder(found: Mapping[str, Any]) -> Holder | None:
    """The holder of a lease; None if it is no lease."""
    try:
        float(found["renewed_s"]), found["since"]
        return Holder(**{key: found[key] for key in Holder.__dataclass_fields__})
    except (KeyError, TypeError, ValueError):
        return None


def _lapses_s(found: Mapping[str, Any]) -> float:
    return float(found["renewed_s"]) + LAPSE_S


def _stamp(seconds: float) -> str:
    return time.strftime(TIME_FORMAT, time.gmtime(seconds))
