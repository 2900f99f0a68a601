"""The run's end of its mirror: the lease at the start, the process that copies, what it reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from typing import Any, TypeVar

from configs.schema import Config
from pipeline.contracts.cache_folder import cache_folder
from pipeline.contracts.decisions import DecisionLog
from pipeline.contracts.record_files import DamagedFileError
from pipeline.run.child_process import ChildProcess
from pipeline.run.mirror_copier import continues, machine_of, other_run
from pipeline.run.mirror_lease import Holder, Lease
from pipeline.run.mirror_process import FINISH_S, short
from pipeline.run.mirror_store import Store, check_protocol, is_local

ANSWER_S = 60.0
"""Time limit in seconds for a store's answer at the start."""
PROGRAMS = "xla"
"""Kind of the cached files that hold compiled programs."""

Answer = TypeVar("Answer")


class NoAnswerError(ValueError):
    """The store cannot be read now."""


def answer(url: str, ask: Callable[[], Answer], *, limit_s: float = ANSWER_S) -> Answer:
    """What a store answers.

    Args:
        url: of the store.
        ask: asks; it may block for ever.
        limit_s: time limit in seconds.

    Raises:
        NoAnswerError: if it does not answer, or with an error.
        ValueError: what `ask` raises.
    """
    answers = Queue[tuple[Answer | None, Exception | None]]()

    def work() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:  # noqa: BLE001  # of any library of a store
            answers.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        found, error = answers.get(timeout=limit_s)
    except Exception:  # noqa: BLE001
        raise NoAnswerError(f"{url} does not answer within {limit_s:g} s") from None
    if isinstance(error, ValueError):
        raise error
    if error is not None:
        raise NoAnswerError(f"{url} cannot be read or written: {short(error)}")
    return found  # type: ignore[return-value]


class Mirror(ChildProcess):
    """The mirror of a run; copying never blocks the run, nor fails it.

    Args:
        url: MIRROR/NAME; None: there is no mirror, and every call does nothing.
        now: reads a clock, in seconds.
    """

    def __init__(self, url: str | None, *, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.url = url
        self._now = now
        self._lease: Lease | None = None
        self._holder: Holder | None = None
        self._log: DecisionLog
        self._copied_s: float | None = None
        self._left = (0, 0)
        self._finished = self._lost = self._abandoned = False

    @staticmethod
    def of(config: Config) -> Mirror:
        """The mirror of a configuration."""
        return Mirror(mirror_url(config))

    def acquire(self, folder: Path, say: Callable[[str], None]) -> None:
        """Takes the lease; a run on this host starts without it if the mirror cannot be used.

        Args:
            folder: the run folder, with or without a run.
            say: shows a line.

        Raises:
            ValueError: if another process writes to the mirror, if it has what the run folder
                lacks, or if it does not answer and there is no run on this host.
        """
        if self.url is None:
            return
        url, self._holder = self.url, Holder.here()
        lease = Lease(Store(url), self._holder)
        try:
            answer(url, lambda: check_continues(url, folder))
            lease.acquire(say)
        except (NoAnswerError, DamagedFileError) as error:
            failed = str(error)
        except ValueError:
            raise
        except FileNotFoundError:
            failed = (
                f"{url} cannot be written: its bucket does not exist, or the keys in the "
                "environment do not open it"
            )
        except Exception as error:  # noqa: BLE001  # of any library of a store
            failed = f"{url} cannot be written: {short(error)}"
        else:
            self._lease = lease
            return
        if not (folder / "config.json").is_file():
            raise ValueError(f"run.mirror: {failed}") from None
        say(f"run.mirror: {failed}; the run starts, and is copied when the mirror answers")

    async def start(self, config: Config, *, folder: Path, log: DecisionLog) -> None:
        """Starts copying in the background.

        Args:
            config: of the run.
            folder: the run folder.
            log: receives failures, and their end.
        """
        if self.url is None or self._holder is None:
            return
        self._log, self._copied_s = log, self._now()
        try:
            await self.spawn("pipeline.run.mirror_process")
        except OSError as error:
            self._event(f"cannot start ({error})", failed=str(error))
            return
        self._lease = None  # the process gives it back
        self.send(
            url=self.url,
            folder=str(folder),
            holder=asdict(self._holder),
            programs=str(cache_folder(PROGRAMS)),
            machine=machine_of(config.plan.platform),
        )

    def metrics(self) -> dict[str, float]:
        """How far the mirror is behind; empty without one."""
        if self._copied_s is None:
            return {}
        return {"mirror/behind_s": self._now() - self._copied_s}

    async def finish(self) -> None:
        """Waits up to `FINISH_S` for the last copy; logs what is not copied."""
        if not self.is_connected:
            return
        self.send(finish=True)
        self._abandoned |= not await self.ends_within(FINISH_S)
        await self.kill()
        if self._finished or self._lost:
            return
        files, size = self._left
        assert self._copied_s is not None
        left = f"{files} files of {size / 2**20:.1f} MiB" if files else "the end of the run"
        self._event(
            f"{left} could not be copied within {FINISH_S:g} s; the mirror is of "
            f"{self._now() - self._copied_s:.0f} s ago; the same command continues the copy from "
            "this host",
            left_files=files,
            left_bytes=size,
        )

    def close(self) -> None:
        """Ends the process; gives the lease back if there is no process that has done so."""
        super().close()
        lease, self._lease = self._lease, None
        if self._abandoned and self.url is not None and self._holder is not None:
            lease, self._abandoned = Lease(Store(self.url), self._holder), False
        if lease is not None and self.url is not None:
            with suppress(ValueError):
                answer(self.url, lease.release, limit_s=10.0)

    def lost(self) -> None:
        """See `ChildProcess`."""
        self._abandoned = True
        if not self._lost:
            ended = "its process has ended; nothing more is copied until the next start"
            self._event(ended, failed=ended)

    def receive(self, message: Mapping[str, Any]) -> None:
        """See `ChildProcess`; the messages are those of `mirror_process`."""
        if "current" in message:
            self._copied_s = self._now()
        elif "copied" in message:
            self._copied_s = self._now() - message["copied"]["seconds"]
            self._left = (0, 0)
        elif "left" in message:
            self._left = message["left"]
        elif "failed" in message:
            self._event(message["failed"], **message)
        elif "works" in message:
            self._event(message["works"], **message)
        elif "lost" in message:
            self._lost = True
            self._copied_s = None
            self._event(f"{message['lost']}; nothing more is copied, the run goes on", **message)
        else:
            self._finished = True

    def _event(self, what: str, **facts: Any) -> None:
        with suppress(OSError):  # a full disk, which the run's own records report
            self._log.event("mirror", f"mirror {self.url}: {what}", **facts)


def mirror_url(config: Config) -> str | None:
    """MIRROR/NAME of a configuration; None without a mirror."""
    return None if config.run.mirror is None else f"{config.run.mirror}/{config.run.name}"


def check_mirror(mirror: str, folder: Path) -> None:
    """Checks `run.mirror` without keys: a submitted job may have others.

    Args:
        mirror: its value.
        folder: the run folder.

    Raises:
        ValueError: if its protocol has no library here, or its folder cannot have the copy.
    """
    check_protocol(mirror)
    if is_local(mirror):
        Store(f"{mirror}/{folder.name}").check_folder(folder)


def check_continues(url: str, folder: Path) -> None:
    """Refuses a mirror that has what a run folder lacks.

    Raises:
        ValueError: with the two ways to go on.
    """
    store = Store(url, asks_first=True)
    store.check_folder(folder)
    manifest = store.newest()
    if manifest is not None and not continues(folder, manifest):
        raise ValueError(f"run.mirror: {other_run(folder, store, manifest)}")
