"""Child process that logs to Weights & Biases, which isolates the run from failures of W&B.

    python -m pipeline.run.wandb_process

Reads JSON objects from stdin, one per line: first a request (see `Reporter`), then
`{"step": 3, "metrics": {...}}`, `{"alert": {...}}`, `{"summary": {...}}` and at the end
`{"exit_status": 0}`. Writes JSON objects to stdout: `{"failed": TEXT}`; `{"address": URL or folder,
"sync": COMMAND}` after each start of W&B; and at the end `{"uploaded": true or false}`.

The process detaches from the run's process tree: `ray job stop` sends SIGTERM to all descendants of
a job, and W&B's service, a child of this process, would stop without the last step.
"""

from __future__ import annotations

import os

if __name__ == "__main__" and os.fork():
    os._exit(0)  # before the imports, so that the run's child process exits at once

import contextlib
import json
import select
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import wandb

_RESTARTS = 3
"""Maximum number of restarts of W&B's service after its death."""
_UPLOAD_FAILED = b"Fatal error while uploading data"
"""wandb's output when the server permanently refuses data; `finish` still returns normally."""

_FAILURES = (Exception, SystemExit)
"""wandb's exceptions: errors without a common base, and SystemExit when its service dies."""

Send = Callable[..., None]


class Reporter:
    """A W&B run that logs every row, even if W&B's service dies in between.

    Args:
        request: `mode`, "online" or "offline"; `init`, arguments of `wandb.init`; `start_s`, time
            limit of the start in seconds; `rows`, steps and metrics of the run's earlier
            processes; `resumed`, whether these were logged to W&B.
        send: sends an object to the run.
    """

    def __init__(self, request: Mapping[str, Any], send: Send) -> None:
        self._request = request
        self._send = send
        self._rows: list[tuple[int, dict[str, Any]]] = [tuple(row) for row in request["rows"]]
        self._before = len(self._rows) if request["resumed"] else 0
        self._summary: dict[str, Any] = {}
        self._restarts = 0
        self._run: Any = None

    def start(self) -> None:
        """Starts W&B, offline if the server does not answer, and logs the rows that it lacks."""
        modes = ("online", "offline") if self._request["mode"] == "online" else ("offline",)
        for mode in modes:
            try:
                self._start(mode)
            except _FAILURES as error:
                self._send(failed=f"cannot start {mode} ({_short(error)})")
                self._drop()
            else:
                self._attempt(self._log_missing)
                return

    def _start(self, mode: str) -> None:
        optional = {"x_transaction_log_flush_interval": 1.0}  # default 15 s: lost in a kill
        settings = wandb.Settings(
            console="off",
            silent=True,
            init_timeout=self._request["start_s"],
            **{key: value for key, value in optional.items() if key in wandb.Settings.model_fields},
        )
        online = mode == "online"
        # W&B's own error reporting blocks for long if the server does not answer.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            resume="allow" if online else None,
            settings=settings,
            **self._request["init"],
        )
        self._run = run
        folder = Path(run.dir).parent
        option = "--include-online " if online else ""
        self._send(
            address=run.url if online else str(folder),
            sync=f"wandb sync {option}{shlex.quote(str(folder))}",
        )

    def _log_missing(self, run: Any) -> None:
        """Logs the rows and the summary that the started run does not have."""
        # Offline, the rows of earlier processes are in their own files.
        for step, metrics in self._rows[self._before if run.offline else 0 :]:
            if step >= run.starting_step:
                run.log(metrics, step=step)
        run.summary.update(self._summary)

    def take(self, message: Mapping[str, Any]) -> None:
        """Logs metrics, an alert or the summary."""
        if "metrics" in message:
            step, metrics = message["step"], message["metrics"]
            self._rows.append((step, metrics))
            self._attempt(lambda run: run.log(metrics, step=step))
        elif "alert" in message:
            self._attempt(lambda run: run.alert(**message["alert"]))
        else:
            self._summary |= message["summary"]
            self._attempt(lambda run: run.summary.update(message["summary"]))

    def finish(self, exit_status: int) -> None:
        """Blocks until everything is uploaded, or offline on disk; may never return."""

        def finish(run: Any) -> None:
            run.finish(exit_code=exit_status)
            # Offline, `run.finish` returns before the run is on disk.
            wandb.teardown(exit_status)

        self._attempt(finish)

    def _attempt(self, action: Callable[[Any], None]) -> None:
        while self._run is not None:
            try:
                action(self._run)
            except _FAILURES as error:
                self._send(failed=f"its service has failed ({_short(error)})")
                self._drop()
                if self._restarts < _RESTARTS:
                    self._restarts += 1
                    self.start()
            else:
                return

    def _drop(self) -> None:
        """Kills the service, so that nothing blocks on it and the next start creates a new one."""
        self._run = None
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(*_FAILURES):
            wandb.teardown()

    @property
    def online(self) -> bool:
        """Whether data are uploaded to W&B's server."""
        return self._run is not None and not self._run.offline


def main() -> None:
    """Serves one run until it finishes, or until `finish_s` after the end of its process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # wandb prints to stdout and stderr, and its service inherits them.
    lines, out = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    printed = tempfile.TemporaryFile()  # noqa: SIM115  # until the process ends
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, number in ((nothing, 0), (nothing, 1), (printed.fileno(), 2)):
        os.dup2(source, number)

    def send(**facts: Any) -> None:
        with contextlib.suppress(OSError):  # the run's process has ended
            print(json.dumps(facts), file=out, flush=True)

    request = json.loads(lines.readline())
    bound = threading.Thread(target=_end, args=(lines.fileno(), request["finish_s"]), daemon=True)
    bound.start()
    reporter = Reporter(request, send)
    reporter.start()
    exit_status = 1  # if the run is killed
    for line in lines:
        message = json.loads(line)
        if "exit_status" in message:
            exit_status = message["exit_status"]
        else:
            reporter.take(message)
    reporter.finish(exit_status)
    send(uploaded=reporter.online and not _upload_failed(printed))
    out.close()
    # Skips wandb's exit handlers, which may never return.
    os._exit(0)


def _end(stdin: int, finish_s: float) -> None:
    """Ends this process `finish_s` after the other end of its stdin is closed."""
    poll = select.poll()
    poll.register(stdin, 0)  # hang-ups are always reported
    poll.poll()
    time.sleep(finish_s)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


def _upload_failed(printed: BinaryIO) -> bool:
    printed.seek(0)
    return _UPLOAD_FAILED in printed.read()


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:500] if str(error) else type(error).__name__


if __name__ == "__main__":
    main()
