"""Logs a run to Weights & Biases; a failure of W&B never affects the run."""

from __future__ import annotations

import asyncio
import netrc
import os
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import psutil

from configs.schema import Config
from pipeline.run.threads import LogEvent, first_line, from_threads

if TYPE_CHECKING:
    from pipeline.run.wandb_run import WandbRun

Mode = Literal["online", "offline", "disabled"]
Message = Mapping[str, Any]
"""A row: see `step_message`, `evaluation_message`, `mark_message`."""

Call = tuple[str, tuple[Any, ...]]
"""A method of `WandbRun` and its arguments."""

START_S = 20.0
"""Time limit in seconds for the W&B server's answer; after it W&B runs offline."""
FINISH_S = 20.0
"""Time limit in seconds for the final upload, after the devices are released."""


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
    if wanted == "disabled":
        return "disabled", "W&B: disabled by wandb.mode; metrics are in metrics.jsonl only"
    if wanted == "offline":
        return "offline", "W&B: offline by wandb.mode"
    if not logged_in:
        return "offline", (
            "W&B: offline, because there is no W&B login; `wandb login` logs in for later runs"
        )
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


def step_message(metrics: Mapping[str, Any], *, step: int, rollouts: str | None) -> Message:
    """The message of a training step; `rollouts` is the name of the file with its rollouts."""
    return {"step": step, "metrics": metrics, "rollouts": rollouts}


def evaluation_message(
    name: str, metrics: Mapping[str, Any], *, version: int, step: int, rewards_version: int = 0
) -> Message:
    """The message of an evaluation of a policy version, after `step` steps.

    Args:
        name: of the evaluation.
        metrics: its numbers, by their names in W&B.
        version: the policy version.
        step: training steps done.
        rewards_version: of the current rewards; see `history.rewards_version`.
    """
    return {
        "evaluation": name,
        "metrics": metrics,
        "version": version,
        "rewards_version": rewards_version,
        "step": step,
    }


def mark_message(metric: str, *, step: int) -> Message:
    """The message of a metric that is 1 at a step."""
    return {"mark": metric, "step": step}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with keys joined by slashes; without values that are None."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}/")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


class Tracker:
    """A W&B run in this process; its calls return at once, and a thread makes them.

    An error of W&B turns it off with one message. Of a killed run W&B may lack the last rows; if it
    is online, the next start sends them.

    Args:
        mode: see `choose_mode`.
        run_id: id of the W&B run to resume; None: a new run.
    """

    def __init__(self, mode: Mode, *, run_id: str | None) -> None:
        self._resumed = run_id is not None
        self.run_id = uuid.uuid4().hex[:8] if run_id is None and mode != "disabled" else run_id
        self._mode = mode
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._ended = threading.Event()
        self._run: WandbRun | None = None
        self._uploaded = self._closed = False
        self._log_event: LogEvent
        self._is_started = False

    def start(
        self, config: Config, *, folder: Path, rows: Sequence[Message], log_event: LogEvent
    ) -> None:
        """Starts W&B in the background; `log_event` receives its success or failure.

        Args:
            config: becomes the config of the W&B run.
            folder: the run folder.
            rows: steps, evaluations and marks of the run's earlier processes, as `step_message`,
                `evaluation_message` and `mark_message` make them; W&B may lack some of them.
            log_event: writes an event to journal and console; called in the thread of the caller's
                event loop.
        """
        if self._mode == "disabled":
            return
        self._log_event = from_threads(log_event)
        self._is_started = True
        given = {
            "project": config.wandb.project,
            "entity": config.wandb.entity,
            "group": config.wandb.group,
            "tags": config.wandb.tags,
            "job_type": config.wandb.job_type,
            "notes": config.wandb.notes,
            "name": config.run.name,
            "id": self.run_id,
            "dir": str(folder),
            "config": config.model_dump(mode="json"),
        }
        tables = config.wandb.table_every, config.sft_steps + 1
        threading.Thread(
            target=self._serve, args=(given, folder, tables, rows), name="W&B", daemon=True
        ).start()

    def log(self, metrics: Mapping[str, Any], *, step: int, rollouts: str | None = None) -> None:
        """Logs the metrics of a step; `rollouts` is the name of its file of rollouts, if any."""
        self._call("log_row", step_message(metrics, step=step, rollouts=rollouts))

    def log_evaluation(self, name: str, metrics: Mapping[str, Any], **at: int) -> None:
        """Logs the metrics of an evaluation; see `evaluation_message`.

        They become part of the summary, too, except for validations: there `summarize` gives the
        values of the best version.
        """
        self._call("log_row", evaluation_message(name, metrics, **at))

    def mark(self, metric: str, *, step: int) -> None:
        """Logs a metric that is 1 at a step, and has no value at others."""
        self._call("log_row", mark_message(metric, step=step))

    def log_artifact(self, kind: str, path: Path, *, metadata: Mapping[str, Any]) -> None:
        """Uploads a file or a folder as the artifact `KIND-ID`.

        Large files are referenced instead, except for the adapter of an export.
        """
        self._call("log_artifact", kind, path, metadata)

    def alert(self, title: str, text: str, *, level: Literal["INFO", "WARN", "ERROR"]) -> None:
        """Makes an alert, which W&B shows and mails to those who subscribe to alerts."""
        self._call("alert", title, text, level)

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Sets values of the summary; those of nested tables get names like metrics, `eval/n`."""
        self._call("summarize", flat(summary))

    async def finish(self, *, exit_status: int) -> None:
        """Waits up to `FINISH_S` for the upload; logs how to upload later what is not uploaded.

        W&B shows the run as failed if the status is not 0.
        """
        if not self._is_started:
            return
        self._call("finish", exit_status)
        self._calls.put(None)
        ended = await asyncio.to_thread(self._ended.wait, FINISH_S)
        await asyncio.sleep(0)  # messages of the thread come first
        self.close()
        if self._uploaded:
            return
        if self._run is None:
            if not ended:
                self._log_event("wandb", "W&B: did not start; metrics.jsonl is complete")
            return
        text = f"to upload this run: {self._run.sync}"
        if self._run.is_online:
            after = "" if ended else f" after {FINISH_S:g} s"
            text = f"the upload of this run is incomplete{after}; to upload it: {self._run.sync}"
        self._log_event("wandb", f"W&B: {text}", uploaded=False, sync=self._run.sync)

    def close(self) -> None:
        """Ends W&B's service, unless it has ended: nothing waits for it when this process exits."""
        self._closed = True
        if self._is_started and not self._ended.is_set():
            end_service()

    def _call(self, method: str, *arguments: Any) -> None:
        if self._is_started and not self._ended.is_set():
            self._calls.put((method, arguments))

    def _serve(
        self,
        given: Mapping[str, Any],
        folder: Path,
        tables: tuple[int, int],
        rows: Sequence[Message],
    ) -> None:
        """Makes the calls, until `finish` or an error; the function of the thread."""
        try:
            from pipeline.run import wandb_run  # late: wandb's import takes seconds

            self._run = run = wandb_run.start(
                self._mode, given, folder=folder, tables=tables, log_event=self._log_event
            )
            facts = {"address": run.address, "sync": run.sync}
            self._log_event("wandb", f"W&B: {run.address}", **facts)
            # Offline, the files of the earlier processes have their rows.
            for row in rows if run.is_online or not self._resumed else ():
                run.log_row(row)
            while (call := self._calls.get()) is not None:
                method, arguments = call
                getattr(run, method)(*arguments)
            self._uploaded = run.is_online
        except (Exception, SystemExit) as error:  # noqa: BLE001  # wandb's errors have no common base
            if self._closed:
                return
            end_service()
            text = f"W&B: turned off ({first_line(error)}); metrics.jsonl is complete"
            self._log_event("wandb", text, failed=first_line(error))
        finally:
            self._ended.set()


def end_service() -> None:
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
