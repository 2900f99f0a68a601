"""Child process that copies a run folder to its mirror, which isolates the run from the store.

    python -m pipeline.run.mirror_process

Reads JSON objects from stdin, one per line: a request (see `main`), and `{"finish": true}` at the
end of the run. Writes JSON objects to stdout:

    {"copied": {...}}     a state is in the mirror
    {"current": true}     nothing has changed since then
    {"left": [3, 4096]}   files and bytes that the copy under way has still to store
    {"failed": TEXT}      the first failure
    {"works": TEXT}       the first success after it
    {"lost": TEXT}        another process writes to the mirror, and this one ends
    {"finished": true}    everything is copied

It ends when stdin does; after `finish` it has `FINISH_S` more. It ignores the signals of a job's
end: the last checkpoint is still to be copied.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.run.mirror_copier import BusyFolderError, Copier, OtherRunError
from pipeline.run.mirror_lease import RENEW_EVERY_S, Holder, Lease, LeaseLostError
from pipeline.run.mirror_store import Store

LOOK_EVERY_S = 5.0
"""Pause between two looks at the run folder."""
LONGEST_PAUSE_S = 60.0
"""Pause between two attempts after many failures."""
FINISH_S = 60.0
"""Time limit in seconds for the last copy, after the devices are released."""
SLOW_S = 300.0
"""A copy that takes longer is reported."""


class Service:
    """Copies until the run ends.

    Args:
        copier: of the run folder.
        lease: of the mirror.
        send: sends an object to the run.
        now: reads a clock, in seconds.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        copier: Copier,
        lease: Lease,
        send: Callable[..., None],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._copier, self._lease = copier, lease
        self._send, self._now, self._sleep = send, now, sleep
        self._state = threading.Lock()
        self._trouble = False
        self._began_s: float | None = None

    def run(self, finish: threading.Event) -> None:
        """Copies what has changed, at intervals, and once more when `finish` is set.

        Raises:
            LeaseLostError: if another process writes to the mirror.
            OtherRunError: if the mirror has what the run folder lacks.
        """
        pause_s = LOOK_EVERY_S
        while True:
            finishes, copied = finish.is_set(), self._attempt()
            if finishes and copied:
                if self._copier.is_current():
                    return
                continue
            pause_s = LOOK_EVERY_S if copied else min(2 * pause_s, LONGEST_PAUSE_S)
            wait = self._sleep if finishes else finish.wait
            wait(pause_s)

    def _attempt(self) -> bool:
        """Copies once, if something has changed; returns whether that succeeded."""
        try:
            if self._copier.is_current():
                self._send(current=True)
            else:
                self._copy()
        except (LeaseLostError, OtherRunError):
            raise
        except BusyFolderError:
            return False
        except Exception as error:  # noqa: BLE001  # of any library of a store
            self._report_failure(f"cannot be written ({short(error)}); it is tried again")
            return False
        self._report_success()
        return True

    def _copy(self) -> None:
        began_s = self._began_s = self._now()
        try:
            manifest = self._copier.copy()
        finally:
            self._began_s = None
        self._send(
            copied={
                "seconds": self._now() - began_s,
                "checkpoint": manifest.checkpoint,
                "files": len(manifest.files),
                "bytes": sum(stored.bytes for stored in manifest.files.values()),
            }
        )
        self._copier.copy_programs()

    def beat(self) -> None:
        """Renews the lease and reports a slow copy; called beside `run` every `RENEW_EVERY_S`.

        Raises:
            LeaseLostError: if another process writes to the mirror.
        """
        try:
            self._lease.renew()
        except LeaseLostError:
            raise
        except Exception as error:  # noqa: BLE001  # of any library of a store
            self._report_failure(f"cannot be written ({short(error)}); it is tried again")
        files, size = self._copier.left
        self._send(left=(files, size))
        if self._began_s is not None and (taken_s := self._now() - self._began_s) >= SLOW_S:
            self._report_failure(
                f"is slow: a copy has taken {taken_s:.0f} s so far, {files} files of "
                f"{size / 2**20:.0f} MiB are left"
            )

    def _report_failure(self, what: str) -> None:
        with self._state:
            if not self._trouble:
                self._trouble = True
                self._send(failed=what)

    def _report_success(self) -> None:
        with self._state:
            if self._trouble:
                self._trouble = False
                self._send(works="is written again")


def short(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def main() -> None:
    """Serves one run.

    The request has `url` and `folder`, the `holder` of the lease, and `programs` and `machine` as
    `Copier` takes them.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)  # after the run's own processes
    # Libraries print to stdout and stderr.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    finish, sending = threading.Event(), threading.Lock()

    def send(**message: object) -> None:
        with sending, contextlib.suppress(OSError):  # the run's process has ended
            print(json.dumps(message), file=out, flush=True)

    def listen() -> None:
        for _ in sys.stdin:
            finish.set()
        if finish.is_set():
            time.sleep(FINISH_S)
        os._exit(1)  # the run was killed, or does not wait any longer

    def beat() -> None:
        while True:
            time.sleep(RENEW_EVERY_S)
            try:
                service.beat()
            except LeaseLostError as lost:
                send(lost=str(lost))
                os._exit(1)

    request = json.loads(sys.stdin.readline())
    store = Store(request["url"])
    lease = Lease(store, Holder(**request["holder"]))
    copier = Copier(
        Path(request["folder"]),
        store,
        programs=Path(request["programs"]),
        machine=request["machine"],
        guard=lease.renew,
    )
    service = Service(copier, lease, send)
    for work in (listen, beat):
        threading.Thread(target=work, daemon=True).start()
    try:
        service.run(finish)
        with contextlib.suppress(Exception):
            lease.release()
        send(finished=True)
    except (LeaseLostError, OtherRunError) as lost:
        send(lost=str(lost))
    out.close()
    os._exit(0)  # threads of libraries may never end


if __name__ == "__main__":
    main()
