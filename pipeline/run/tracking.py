"""Logs a run to Weights & Biases; a failure of W&B never affects the run."""

from __future__ import annotations

import asyncio
import netrc
import os
import shlex
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil

from configs.schema import Config
from pipeline.run.record_files import read_rows
from pipeline.run.rollout_samples import distributions, sample_table
from pipeline.run.threads import LogEvent, first_line, from_threads

Mode = Literal["online", "offline", "disabled"]

START_S = 20.0
"""Time limit in seconds for the W&B server's answer; after it W&B runs offline."""
FINISH_S = 20.0
"""Time limit in seconds for the final upload, after the devices are released."""
_BINS = 32
"""Bins of a histogram."""
_ADAPTER = "adapter"
"""Folder in an export that is uploaded; merged weights are not."""


def choose_mode(config: Config) -> tuple[Mode, str]:
    """Returns the W&B mode and a message with the reason.

    Raises:
        ValueError: if `wandb.mode = "online"` without a login.
    """
    wanted = config.wandb.mode
    logged_in = is_logged_in()
    if wanted == "online" and not logged_in:
        raise ValueError(
            "wandb.mode = 'online', but this machine has no W&B login; run `wandb login` or set "
            "WANDB_API_KEY where Ray was started, or use wandb.mode = 'auto'"
        )
    if wanted in {"disabled", "offline"}:
        return wanted, f"W&B: {wanted} by wandb.mode"
    if not logged_in:
        return "offline", "W&B: offline; `wandb login` logs in for later runs"
    return "online", "W&B: online"


def is_logged_in() -> bool:
    """Whether this machine has a W&B login."""
    # Not wandb's own check, which prompts on a terminal.
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        logins = netrc.netrc(Path(os.environ.get("NETRC") or "~/.netrc").expanduser())
    except (OSError, RuntimeError, netrc.NetrcParseError):  # RuntimeError: no home folder
        return False
    return logins.authenticators(server) is not None


class Tracker:
    """A W&B run in this process; its calls return at once, and a thread makes them.

    A row of the history has the number of its training step, which is W&B's `_step`. A row that
    W&B has is closed: a step that a resumed run repeats keeps its first values, and evaluations
    that follow a resume are in later rows, with their version. An error of W&B turns it off with
    one message. `run_id` is that of the W&B run to resume; None: a new run.
    """

    def __init__(self, mode: Mode, *, run_id: str | None) -> None:
        self._resumed = run_id is not None
        self.run_id = uuid.uuid4().hex[:8] if run_id is None and mode != "disabled" else run_id
        self._mode = mode
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended = threading.Event()
        self._ended.set()  # until `start`
        self._uploaded = self._closed = False
        self._next_row = 0
        self._evaluated: dict[str, int] = {}
        self._sync: str | None = None
        self._defined: set[str] = set()
        self._run: Any
        self._config: Config
        self._folder: Path
        self._log_event: LogEvent

    def start(
        self,
        config: Config,
        *,
        folder: Path,
        rows: Sequence[Mapping[str, Any]],
        log_event: LogEvent,
    ) -> None:
        """Starts W&B in the background.

        `rows` are the steps of the run's earlier processes, as in `metrics.jsonl`; those that W&B's
        server lacks are sent. `log_event` is called in the thread of the caller's event loop.
        """
        if self._mode == "disabled":
            return
        self._config, self._folder, self._log_event = config, folder, from_threads(log_event)
        self._ended.clear()
        threading.Thread(target=self._serve, args=[rows], name="W&B", daemon=True).start()

    def log(self, metrics: Mapping[str, Any], *, step: int, rollouts: str | None = None) -> None:
        """Logs the metrics of a step; `rollouts` is the name of its file of rollouts, if any."""
        self._call(self._log_step, metrics, step, rollouts)

    def log_evaluation(
        self, name: str, metrics: Mapping[str, Any], *, version: int, step: int
    ) -> None:
        """Logs the metrics of an evaluation of a policy version, after `step` steps.

        They become part of the summary, too, except for validations: there `summarize` gives the
        values of the best version.
        """
        values = {f"eval/{name}/version": version, **metrics}
        self._call(self._log_evaluation, name, values, step)
        if name != "validation":
            self.summarize(metrics)

    def log_adapter(self, export: Path, *, metadata: Mapping[str, Any]) -> None:
        """Uploads the adapter of an export as the artifact `export-ID`."""
        self._call(self._log_adapter, export / _ADAPTER, metadata)

    def alert(self, title: str, text: str, *, level: Literal["INFO", "WARN", "ERROR"]) -> None:
        """Makes an alert, which W&B shows and mails to those who subscribe to alerts."""
        self._call(lambda: self._run.alert(title=title, text=text, level=level))

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Sets values of the summary; those of nested tables get names like metrics, `eval/n`."""
        self._call(lambda: self._run.summary.update(_flat(summary)))

    async def finish(self, *, exit_status: int) -> None:
        """Waits up to `FINISH_S` for the upload; logs how to upload later what is not uploaded.

        W&B shows the run as failed if the status is not 0.
        """
        self._call(self._finish, exit_status)
        self._calls.put(None)
        in_time = await asyncio.to_thread(self._ended.wait, FINISH_S)
        await asyncio.sleep(0)  # messages of the thread come first
        self.close()
        if self._sync is None and not in_time:
            self._log_event("wandb", "W&B: did not start; metrics.jsonl is complete")
        elif self._sync is not None and not self._uploaded:
            text = f"W&B: to upload what is not uploaded of this run: {self._sync}"
            self._log_event("wandb", text, uploaded=False, sync=self._sync)

    def close(self) -> None:
        """Ends W&B's service, unless it has ended: nothing waits for it when this process exits."""
        self._closed = True
        if not self._ended.is_set():
            _end_service()

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        if not self._ended.is_set():
            self._calls.put(partial(method, *arguments))

    # --- in the thread

    def _serve(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Makes the calls, until `finish` or an error."""
        try:
            self._start()
            if self._run.offline and self._resumed:  # the earlier processes' files have their rows
                self._next_row = max((row["step"] + 1 for row in rows), default=0)
            else:
                for row in rows:
                    self._log_step(row, row["step"], None)
            while (call := self._calls.get()) is not None:
                call()
            self._uploaded = not self._run.offline
        except (Exception, SystemExit) as error:  # noqa: BLE001  # wandb's errors have no common base
            if self._closed:
                return
            _end_service()
            text = f"W&B: turned off ({first_line(error)}); metrics.jsonl is complete"
            self._log_event("wandb", text, failed=first_line(error))
        finally:
            self._ended.set()

    def _start(self) -> None:
        """Starts W&B; offline, with a message, if its server does not answer within `START_S`."""
        # W&B's own error reporting blocks for long if the server does not answer.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # Files of artifacts wait for their upload here; a run folder that is copied has them.
        os.environ.setdefault("WANDB_DATA_DIR", str(self._folder / "wandb"))
        import wandb  # late: it takes seconds

        begin = partial(
            wandb.init,
            **self._config.wandb.model_dump(exclude={"mode", "table_every"}),
            name=self._config.run.name,
            id=self.run_id,
            dir=str(self._folder),
            config=self._config.model_dump(mode="json"),
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=START_S,
                x_transaction_log_flush_interval=1.0,  # default 15 s: lost in a kill
            ),
        )
        try:
            self._run = begin(mode=self._mode, resume="allow" if self._mode == "online" else None)
        except (Exception, SystemExit) as error:
            if self._mode == "offline" or self._closed:
                raise
            text = f"cannot start online ({first_line(error)})"
            self._log_event("wandb", f"W&B: {text}; it is offline", failed=text)
            _end_service()
            self._run = begin(mode="offline")
        own = Path(self._run.dir).parent
        if self._run.offline:  # each process writes a folder; they are uploaded in their order
            parts = f"{shlex.quote(str(own.parent))}/offline-run-*-{self.run_id}*"
            address, self._sync = str(own), f"wandb sync {parts}"
        else:
            sync = f"wandb sync --include-online {shlex.quote(str(own))}"
            address, self._sync = self._run.url, sync
        self._log_event("wandb", f"W&B: {address}", address=address, sync=self._sync)

    def _log_step(self, metrics: Mapping[str, Any], step: int, rollouts: str | None) -> None:
        """Logs a step that W&B lacks."""
        if step >= self._run.step:
            self._log_row({"step": step, **metrics, **self._media(step, rollouts)}, step)

    def _log_row(self, values: Mapping[str, Any], step: int) -> None:
        for name in values:
            self._define(name)
        self._run.log(dict(values), step=max(step, self._run.step))

    def _log_evaluation(self, name: str, values: Mapping[str, Any], step: int) -> None:
        """Logs an evaluation to the first open row from `step` on that has none of this name."""
        row = max(step, self._run.step, self._next_row, self._evaluated.get(name, -1) + 1)
        self._evaluated[name] = row
        self._log_row(values, row)

    def _define(self, name: str) -> None:
        """Defines the axis of a metric, and of evaluations that their summary is set explicitly.

        W&B's own summaries are of the last row, or the best since the last start of its process,
        which after a resume is neither the exported version's value nor the best one.
        """
        first, *_ = parts = name.split("/")
        options: dict[str, Any] = {"hidden": True} if name == "step" else {}
        if len(parts) == 1:
            glob = name
        elif first == "eval":
            glob = f"eval/{parts[1]}/*"
            options = {"step_metric": f"eval/{parts[1]}/version", "summary": "none"}
        else:
            glob, options = f"{first}/*", {"step_metric": "step"}
        if glob not in self._defined:
            self._defined.add(glob)
            self._run.define_metric(glob, **options)

    def _media(self, step: int, rollouts: str | None) -> dict[str, Any]:
        """The histograms of a step and, every few steps, its table."""
        if rollouts is None:
            return {}
        import wandb

        records = list(read_rows(self._folder / "rollouts" / f"{rollouts}.jsonl"))
        media: dict[str, Any] = {
            name: wandb.Histogram(values, num_bins=_BINS)
            for name, values in distributions(records).items()
        }
        every, first = self._config.wandb.table_every, self._config.sft_steps + 1
        if records and every and (step == first or step % every == 0):
            media["rollouts"] = wandb.Table(*sample_table(records, step=step))
        return media

    def _log_adapter(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        import wandb

        artifact = wandb.Artifact(f"export-{self.run_id}", "export", metadata=dict(metadata))
        try:
            for file in folder.iterdir():  # add_dir writes to the console
                artifact.add_file(str(file), skip_cache=True)
        except (OSError, ValueError) as error:  # the next export replaces the folder
            text = f"the adapter is not uploaded ({first_line(error)})"
            self._log_event("wandb", f"W&B: {text}", failed=text)
        else:
            self._run.log_artifact(artifact)

    def _finish(self, exit_status: int) -> None:
        """Blocks until everything is uploaded, or offline on disk; may never return."""
        import wandb

        self._run.finish(exit_code=exit_status)
        # Offline, `run.finish` returns before the run is on disk.
        wandb.teardown(exit_status)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with keys joined by slashes; without values that are None."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}/")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def _end_service() -> None:
    """Kills the service that wandb has started for this process, and forgets it."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            if "wandb-core" in child.name():
                child.kill()
                child.wait(5)
    wandb = sys.modules.get("wandb")
    if wandb is not None:
        with suppress(Exception, SystemExit):  # else it reports the death when this process exits
            wandb.teardown()
