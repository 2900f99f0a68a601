"""A W&B run: what becomes rows, tables, histograms, summary, artifacts and alerts.

Importing this imports wandb. All functions may raise whatever wandb raises, and may block:
`Tracker` calls them in a thread.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from pipeline.run.record_files import DamagedFileError, read_rows
from pipeline.run.rollout_samples import distributions, sample_table
from pipeline.run.threads import LogEvent, first_line
from pipeline.run.tracking import START_S, Message, Mode, end_service

_BINS = 32
"""Bins of a histogram."""
_LARGE_BYTES = 64 * 2**20
"""Larger files of an export, which are merged weights, are referenced, not uploaded."""
_ADAPTER = "adapter"
"""Folder in an export whose files are uploaded whatever their size."""
_VALIDATION = "validation"
"""The evaluation of which the summary has the best version's values."""


def start(
    mode: Mode,
    given: Mapping[str, Any],
    *,
    folder: Path,
    tables: tuple[int, int],
    log_event: LogEvent,
) -> WandbRun:
    """Starts W&B; offline, with a message, if its server does not answer within `START_S`.

    Args:
        mode: online or offline.
        given: arguments of `wandb.init`.
        folder: the run folder.
        tables: steps between two tables of rollouts, and the first step with one.
        log_event: receives messages.
    """
    # W&B's own error reporting blocks for long if the server does not answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    # Files of artifacts wait for their upload here; a run folder that is copied has them.
    os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))
    optional = {"x_transaction_log_flush_interval": 1.0}  # default 15 s: lost in a kill
    settings = wandb.Settings(
        console="off",
        silent=True,
        init_timeout=START_S,
        **{key: value for key, value in optional.items() if key in wandb.Settings.model_fields},
    )
    if mode == "online":
        try:
            run = wandb.init(mode="online", resume="allow", settings=settings, **given)
            return WandbRun(run, folder, tables, log_event)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # wandb's have no common base
            text = f"cannot start online ({first_line(error)})"
            log_event("wandb", f"W&B: {text}; it is offline", failed=text)
            end_service()
    run = wandb.init(mode="offline", settings=settings, **given)
    return WandbRun(run, folder, tables, log_event)


class WandbRun:
    """A started W&B run.

    A row of the history has the number of its training step, which is W&B's `_step`. A row that
    W&B has is closed: a step that a resumed run repeats keeps its first values, and an evaluation
    that follows a resume is in the next row.

    Args:
        run: wandb's object.
        folder: the run folder.
        tables: see `start`.
        log_event: receives messages.

    Attributes:
        is_online: whether data are uploaded to W&B's server.
        address: page of the run, or its folder.
        sync: command that uploads the run.
    """

    def __init__(
        self, run: Any, folder: Path, tables: tuple[int, int], log_event: LogEvent
    ) -> None:
        self._run, self._folder, self._tables = run, folder, tables
        self._log_event = log_event
        self._defined: set[str] = set()
        self._logged_artifacts: dict[str, str] = {}
        self.is_online = not run.offline
        own = Path(run.dir).parent
        self.address = run.url if self.is_online else str(own)
        # Offline each process writes a folder; W&B's command uploads them in their order.
        parts = f"{shlex.quote(str(own.parent))}/offline-run-*-{run.id}*"
        command = f"wandb sync --include-online {shlex.quote(str(own))}"
        self.sync = command if self.is_online else f"wandb sync {parts}"

    def log_row(self, message: Message) -> None:
        """Logs a step, an evaluation or a mark, unless it is a step that W&B has."""
        step, evaluation = message["step"], message.get("evaluation")
        if "mark" in message:
            values: dict[str, Any] = {message["mark"]: 1.0}
        elif evaluation is not None:
            values = {f"eval/{evaluation}/version": message["version"], **message["metrics"]}
            if message["rewards_version"]:
                values[f"eval/{evaluation}/rewards_version"] = message["rewards_version"]
        elif step < self._run.step:
            return
        else:
            values = {"step": step, **message["metrics"], **self._media(step, message["rollouts"])}
        for name in values:
            self._define(name)
        self._run.log(values, step=max(step, self._run.step))
        if evaluation not in (None, _VALIDATION):
            self._run.summary.update(message["metrics"])

    def summarize(self, values: Mapping[str, Any]) -> None:
        """Sets values of the summary."""
        self._run.summary.update(values)

    def alert(self, title: str, text: str, level: str) -> None:
        """Makes an alert."""
        self._run.alert(title=title, text=text, level=level)

    def log_artifact(self, kind: str, path: Path, metadata: Mapping[str, Any]) -> None:
        """Uploads a file or a folder as `KIND-ID`, unless it is what was uploaded last."""
        name = f"{kind}-{self._run.id}"
        artifact = wandb.Artifact(name, kind, metadata=dict(metadata))
        is_file = path.is_file()
        files = [path] if is_file else sorted(one for one in path.rglob("*") if one.is_file())
        referenced, uploaded_bytes = list[str](), 0
        try:
            if not files:
                raise FileNotFoundError(f"{path} is not on this host")
            for file in files:
                inside = file.name if is_file else str(file.relative_to(path))
                size = file.stat().st_size
                if size > _LARGE_BYTES and not inside.startswith(f"{_ADAPTER}/"):
                    artifact.add_reference(file.as_uri(), name=inside, checksum=False)
                    referenced.append(inside)
                else:
                    artifact.add_file(str(file), name=inside, skip_cache=True)
                    uploaded_bytes += size
        except (OSError, ValueError) as error:  # or the next export replaces the folder
            text = f"{name} is not uploaded ({first_line(error)})"
            self._log_event("wandb", f"W&B: {text}", failed=text)
            return
        if self._logged_artifacts.get(name) == artifact.digest:
            return
        self._logged_artifacts[name] = artifact.digest
        self._run.log_artifact(artifact)
        if is_file:
            return
        count = len(files) - len(referenced)
        line = f"artifact {name}: {count} files, {uploaded_bytes / 2**20:.1f} MiB"
        if referenced:
            line += f"; not uploaded, only referenced: {', '.join(referenced)}"
        facts = {"files": count, "bytes": uploaded_bytes, "referenced": referenced}
        self._log_event("wandb", f"W&B: {line}", artifact=name, **facts)

    def finish(self, exit_status: int) -> None:
        """Blocks until everything is uploaded, or offline on disk; may never return."""
        self._run.finish(exit_code=exit_status)
        # Offline, `run.finish` returns before the run is on disk.
        wandb.teardown(exit_status)

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
        try:
            records = list(read_rows(self._folder / "rollouts" / f"{rollouts}.jsonl"))
            values = distributions(records)
            columns, rows = sample_table(records, step=step)
        except (DamagedFileError, KeyError) as error:
            text = f"no table and histograms of step {step} ({first_line(error)})"
            self._log_event("wandb", f"W&B: {text}", failed=text)
            return {}
        media: dict[str, Any] = {
            name: wandb.Histogram(found, num_bins=_BINS) for name, found in values.items()
        }
        every, first = self._tables
        if rows and every and (step == first or step % every == 0):
            media["rollouts"] = wandb.Table(columns, rows)
        return media
