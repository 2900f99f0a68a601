"""Logs a run to Weights & Biases; a failure of W&B never affects the run."""

from __future__ import annotations

import netrc
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from configs.schema import Config
from pipeline.run.child_process import ChildProcess

Mode = Literal["online", "offline", "disabled"]
LogEvent = Callable[..., None]
"""Takes the kind of an event, a message for the console, and facts for the journal."""

Message = Mapping[str, Any]
"""See `wandb_process`."""

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
        rewards_version: the rewards in force; see `history.rewards_version`.
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


class Tracker(ChildProcess):
    """A W&B run in a separate process, `pipeline.run.wandb_process`; logging never blocks.

    Its process ends by itself within `FINISH_S` after the run is killed.

    Args:
        mode: see `choose_mode`.
        run_id: id of the W&B run to resume; None: a new run.
    """

    def __init__(self, mode: Mode, *, run_id: str | None) -> None:
        super().__init__()
        new = mode != "disabled" and run_id is None
        self.run_id = uuid.uuid4().hex[:8] if new else run_id
        self._mode = mode
        self._resumed = not new
        self._log_event: LogEvent
        self._sync: str | None = None
        self._temporary: str | None = None
        self._finished = self._uploaded = False

    async def start(
        self,
        config: Config,
        *,
        folder: Path,
        rows: Sequence[Message],
        log_event: LogEvent,
    ) -> None:
        """Starts W&B in the background; `log_event` receives its success or failure.

        Args:
            config: becomes the config of the W&B run.
            folder: the run folder.
            rows: steps, evaluations and marks of the run's earlier processes, as `step_message`,
                `evaluation_message` and `mark_message` make them; W&B may lack some of them.
            log_event: writes an event to journal and console.
        """
        if self._mode == "disabled":
            return

        def log_if_possible(event: str, text: str, **facts: Any) -> None:
            with suppress(OSError):  # a full disk, which the run's own records report
                log_event(event, text, **facts)

        self._log_event = log_if_possible
        try:
            # Not in the run folder, whose path can be too long for W&B's socket.
            self._temporary = tempfile.mkdtemp(prefix="gemma-grpo-wandb-")
            # W&B shows the arguments of its process as those of the run.
            await self.spawn(
                "pipeline.run.wandb_process",
                *sys.argv[1:],
                environment={"TMPDIR": self._temporary},
            )
        except OSError as error:
            self._log_event("wandb", f"W&B: cannot start ({error})", failed=str(error))
            return
        self.send(
            mode=self._mode,
            resumed=self._resumed,
            rows=rows,
            table_steps=(config.wandb.table_every, config.sft_steps + 1),
            start_s=START_S,
            finish_s=FINISH_S,
            temporary=self._temporary,
            init={
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
            },
        )

    def log(self, metrics: Mapping[str, Any], *, step: int, rollouts: str | None = None) -> None:
        """Sends the metrics of a step, and the name of its file of rollouts, if it has one."""
        self.send(**step_message(metrics, step=step, rollouts=rollouts))

    def log_evaluation(self, name: str, metrics: Mapping[str, Any], **at: int) -> None:
        """Sends the metrics of an evaluation; see `evaluation_message`.

        They become part of the summary, too, except for validations: there `summarize` gives the
        values of the best version.
        """
        self.send(**evaluation_message(name, metrics, **at))

    def mark(self, metric: str, *, step: int) -> None:
        """Sends a metric that is 1 at a step, and has no value at others."""
        self.send(**mark_message(metric, step=step))

    def log_artifact(self, kind: str, path: Path, *, metadata: Mapping[str, Any]) -> None:
        """Sends the path of a file or a folder to upload as the artifact `KIND-ID`.

        Large files are referenced instead, except for the adapter of an export.
        """
        self.send(artifact=f"{kind}-{self.run_id}", type=kind, path=str(path), metadata=metadata)

    def alert(self, title: str, text: str, *, level: Literal["INFO", "WARN", "ERROR"]) -> None:
        """Sends an alert, which W&B shows and mails to those who subscribe to alerts."""
        self.send(alert={"title": title, "text": text, "level": level})

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Sends values of the summary; those of nested tables get names like metrics, `eval/n`."""
        self.send(summary=flat(summary))

    async def finish(self, *, exit_status: int) -> None:
        """Waits up to `FINISH_S` for the upload; logs how to upload later what is not uploaded.

        W&B shows the run as failed if the status is not 0.
        """
        if not self.is_connected:
            return
        self.send(exit_status=exit_status)
        after = "" if await self.ends_within(FINISH_S) else f" after {FINISH_S:g} s"
        await self.kill()
        if self._uploaded:
            return
        text = f"the upload of this run is incomplete{after}; "
        text += f"to upload it: {self._sync}" if self._sync else "metrics.jsonl is complete"
        if self._mode == "offline" and self._finished:
            text = f"to upload this run: {self._sync}"
        self._log_event("wandb", f"W&B: {text}", uploaded=False, sync=self._sync)

    def close(self) -> None:
        """Ends the process and removes its temporary files."""
        super().close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def lost(self) -> None:
        """See `ChildProcess`."""
        ended = "its process has ended"
        self._log_event("wandb", f"W&B: {ended}", failed=ended)

    def receive(self, message: Message) -> None:
        """See `ChildProcess`."""
        if "address" in message:
            self._sync = message["sync"]
            self._log_event("wandb", f"W&B: {message['address']}", **message)
        elif "artifact" in message:
            self._log_event("wandb", f"W&B: {_artifact_line(message)}", **message)
        elif "failed" in message:
            self._log_event("wandb", f"W&B: {message['failed']}", **message)
        else:
            self._finished, self._uploaded = True, message["uploaded"]


def _artifact_line(message: Message) -> str:
    """What becomes of the files of an artifact."""
    mib = message["bytes"] / 2**20
    line = f"artifact {message['artifact']}: {message['files']} files, {mib:.1f} MiB"
    if message["referenced"]:
        line += f"; not uploaded, only referenced: {', '.join(message['referenced'])}"
    return line
