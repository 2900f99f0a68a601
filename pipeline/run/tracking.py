"""Weights & Biases: metrics go there if it works, and the run goes on if it does not."""

from __future__ import annotations

import asyncio
import json
import netrc
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from configs.schema import Config

Mode = Literal["online", "offline", "disabled"]
Tell = Callable[..., None]
"""Takes the kind of an event, a line for people, and facts for the journal."""

START_S = 20.0
"""Seconds that W&B's server has to answer, beside the first steps; then W&B runs offline."""
FINISH_S = 20.0
"""Seconds that the upload of the rest may take at the end, when the devices are free."""


def choose_mode(config: Config) -> tuple[Mode, str]:
    """The mode that the configuration and the machine allow, and one line that says why.

    Raises:
        ValueError: if `wandb.mode = "online"` and nobody is logged in.
    """
    wanted = config.wandb.mode
    logged_in = _logged_in()
    if wanted == "online" and not logged_in:
        raise ValueError(
            "wandb.mode = 'online' but nobody is logged in on this machine; run `wandb login` or "
            "set WANDB_API_KEY where Ray was started, or use wandb.mode = 'auto'"
        )
    if wanted == "disabled":
        return "disabled", "W&B: disabled by wandb.mode; metrics are in metrics.jsonl only"
    if wanted == "offline":
        return "offline", "W&B: offline by wandb.mode; `wandb sync` uploads the run later"
    if not logged_in:
        return "offline", (
            "W&B: offline, because nobody is logged in; `wandb login` mends it, "
            "`wandb sync` uploads this run later"
        )
    return "online", "W&B: online"


def _logged_in() -> bool:
    # Not wandb's own check, which asks on a terminal.
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        logins = netrc.netrc(Path(os.environ.get("NETRC") or "~/.netrc").expanduser())
    except (OSError, RuntimeError, netrc.NetrcParseError):  # Runtime: there is no home
        return False
    return logins.authenticators(server) is not None


class Tracker(asyncio.SubprocessProtocol):
    """A W&B run in a process of its own, `pipeline.run.wandb_process`; the run never waits for it.

    Belongs to one event loop and its thread.

    Args:
        mode: see `choose_mode`.
        run_id: of the W&B run to go on with; None: a new one.
    """

    def __init__(self, mode: Mode, *, run_id: str | None) -> None:
        new = mode != "disabled" and run_id is None
        self.run_id = uuid.uuid4().hex[:8] if new else run_id
        self._mode = mode
        self._resumed = not new
        self._tell: Tell
        self._transport: asyncio.SubprocessTransport | None = None
        self._ended = asyncio.Event()
        self._unread = b""
        self._sync: str | None = None
        self._uploaded = self._finishing = False

    async def start(
        self,
        config: Config,
        *,
        folder: Path,
        rows: Sequence[tuple[int, Mapping[str, Any]]],
        tell: Tell,
    ) -> None:
        """Starts W&B beside the run; `tell` is called when it has started, or cannot.

        Args:
            config: settings; they become the W&B run's config.
            folder: where wandb keeps its files.
            rows: steps and metrics of earlier processes of the run; W&B may lack some of them.
            tell: takes an event for journal and console.
        """
        if self._mode == "disabled":
            return
        self._tell = tell
        # W&B shows the arguments of its process as those of the run.
        command = (sys.executable, "-m", "pipeline.run.wandb_process", *sys.argv[1:])
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: self, *command, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            tell("wandb", f"W&B: cannot start ({error})", failed=str(error))
            return
        self._send(
            mode=self._mode,
            resumed=self._resumed,
            rows=rows,
            start_s=START_S,
            finish_s=FINISH_S,
            init={
                "project": config.wandb.project,
                "entity": config.wandb.entity,
                "name": config.run.name,
                "id": self.run_id,
                "dir": str(folder),
                "config": config.model_dump(mode="json"),
            },
        )

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Sends one step's metrics."""
        self._send(step=step, metrics=metrics)

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Sends what the run ends with."""
        self._send(summary=summary)

    async def finish(self, *, exit_status: int) -> None:
        """Waits until W&B has everything, at most `FINISH_S`; else tells how to upload it later.

        W&B shows a run as failed unless the status is 0.
        """
        if self._transport is None:
            return
        self._send(exit_status=exit_status)
        self._finishing = True
        self._stdin.close()
        after = ""
        try:
            await asyncio.wait_for(self._ended.wait(), FINISH_S)
        except TimeoutError:
            after = f" after {FINISH_S:g} s"
        self.close()
        if self._uploaded:
            return
        remedy = f"to upload it: {self._sync}" if self._sync else "metrics.jsonl has everything"
        self._tell(
            "wandb",
            f"W&B does not have all of this run{after}; {remedy}",
            uploaded=False,
            sync=self._sync,
        )

    def close(self) -> None:
        """Lets go of the process, which then finishes by itself, within `FINISH_S`."""
        if self._transport is not None:
            self._finishing = True
            self._transport.close()
            self._transport = None

    @property
    def _stdin(self) -> asyncio.WriteTransport:
        assert self._transport is not None
        pipe = self._transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        return pipe

    def _send(self, **message: Any) -> None:
        if self._transport is not None and not self._stdin.is_closing():
            # Buffered without a bound where the process does not read; never waits.
            self._stdin.write(json.dumps(message).encode() + b"\n")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.SubprocessProtocol`."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: ARG002  # stdout's alone
        """See `asyncio.SubprocessProtocol`."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._hear(json.loads(line))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """See `asyncio.SubprocessProtocol`."""
        if fd == 1:
            self._ended.set()
            if not self._finishing:
                self._tell("wandb", "W&B: its process has ended", failed="its process has ended")

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "address" in message:
            self._sync = message["sync"]
            self._tell("wandb", f"W&B: {message['address']}", **message)
        elif "failed" in message:
            self._tell("wandb", f"W&B: {message['failed']}", **message)
        else:
            self._uploaded = message["uploaded"]
