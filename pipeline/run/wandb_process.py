"""Child process that logs to Weights & Biases, which isolates the run from failures of W&B.

    python -m pipeline.run.wandb_process

Reads JSON objects from stdin, one per line, first a request (see `Reporter`), then:

    {"step": 3, "metrics": {...}, "rollouts": "step_000003" or null}   a training step
    {"evaluation": NAME, "version": 3, "rewards_version": 0, "step": 3, "metrics": {...}}
    {"mark": METRIC, "step": 4}                                        1 in the row of a step
    {"summary": {...}}, {"alert": {...}}
    {"artifact": NAME, "type": TYPE, "path": file or folder, "metadata": {...}}
    {"exit_status": 0}                                                 at the end

Writes JSON objects to stdout: `{"failed": TEXT}`; `{"address": URL or folder, "sync": COMMAND}`
after each start of W&B; `{"artifact": ...}` with what of a folder is uploaded; and at the end
`{"uploaded": true or false}`.

Tables and histograms are made here, from the run folder's rollouts: the run spends no time on them,
and a resumed run makes those that W&B lacks.

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
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import wandb

from pipeline.contracts.record_files import DamagedFileError, parse_rows
from pipeline.run.rollout_samples import distributions, sample_table
from pipeline.run.wandb_files import read_history, run_files
from pipeline.run.wandb_rows import REWARDS_VERSION, STEP, VERSION, Evaluation, WandbRows

_RESTARTS = 3
"""Maximum number of restarts of W&B's service after its death."""
_UPLOAD_FAILED = b"Fatal error while uploading data"
"""wandb's output when the server permanently refuses data; `finish` still returns normally."""

_BINS = 32
"""Bins of a histogram."""
_LARGE_BYTES = 64 * 2**20
"""Larger files of an export, which are merged weights, are referenced, not uploaded."""
VALIDATION = "validation"
"""The evaluation of which the summary has the best version's values."""
_ADAPTER = "adapter"
"""Folder in an export whose files are uploaded whatever their size."""

_FAILURES = (Exception, SystemExit)
"""wandb's exceptions: errors without a common base, and SystemExit when its service dies."""

Send = Callable[..., None]
Message = Mapping[str, Any]


class Reporter:
    """A W&B run that logs every row, even if W&B's service dies in between.

    Args:
        request: `mode`, "online" or "offline"; `init`, arguments of `wandb.init`; `start_s`, time
            limit of the start in seconds; `rows`, messages of the run's earlier processes;
            `resumed`, whether these were logged to W&B; `table_steps`, the number of steps between
            two tables, and the first step with one; `temporary`, the folder for temporary files,
            TMPDIR, which is removed at the end.
        send: sends an object to the run.
    """

    def __init__(self, request: Mapping[str, Any], send: Send) -> None:
        self._request = request
        self._send = send
        self._folder = Path(request["init"]["dir"])
        self._messages: list[Message] = []
        self._summary: dict[str, Any] = {}
        self._artifacts: dict[str, Message] = {}
        self._restarts = 0
        self._run: Any = None
        self._rows: WandbRows
        self._defined: set[str] = set()
        self._logged_artifacts: dict[str, str] = {}
        for message in request["rows"]:
            self._keep(message)

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
        # Files of artifacts wait for their upload here; a run folder that is copied has them.
        os.environ.setdefault("WANDB_DATA_DIR", str(self._folder / "wandb"))
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            resume="allow" if online else None,
            settings=settings,
            **self._request["init"],
        )
        self._run = run
        folder = Path(run.dir).parent
        self._rows = self._known_rows(folder, first=None if run.offline else run.starting_step)
        self._defined, self._logged_artifacts = set(), {}
        run_id = self._request["init"]["id"]
        # Offline each process writes a folder; W&B's command uploads them in their order. See
        # `run_files` for their names.
        parts = shlex.quote(str(folder.parent)) + f"/offline-run-*-{run_id}*"
        self._send(
            address=run.url if online else str(folder),
            sync=f"wandb sync {parts}"
            if run.offline
            else f"wandb sync --include-online {shlex.quote(str(folder))}",
        )

    def _known_rows(self, started: Path, *, first: int | None) -> WandbRows:
        """The rows that W&B has, of its folders before `started`; on its server up to `first`."""
        history: list[dict[str, Any]] = []
        for file in run_files(self._folder, self._request["init"]["id"]):
            try:
                history += [] if file.parent == started else read_history(file)
            except (OSError, ValueError, subprocess.TimeoutExpired) as error:
                self._send(failed=f"cannot read {file} ({_short(error)})")
        if first is None and not history and self._request["resumed"]:
            # `wandb clean` deletes files that are uploaded.
            first = 1 + max((row["step"] for row in self._request["rows"]), default=-1)
        evaluated = [_evaluation_of(row) for row in self._request["rows"] if "evaluation" in row]
        return WandbRows(history, first=first, evaluated=evaluated)

    def _log_missing(self, run: Any) -> None:
        """Logs the rows, the summary and the artifacts that the started run does not have."""
        before = self._rows.step
        for message in self._messages:
            if "mark" not in message or message["step"] > before:
                self._log_row(run, message)
        run.summary.update(self._summary)
        for message in self._artifacts.values():
            self._log_artifact(run, message)

    def take(self, message: Message) -> None:
        """Logs what a message holds."""
        self._keep(message)
        if "alert" in message:
            self._attempt(lambda run: run.alert(**message["alert"]))
        elif "artifact" in message:
            self._attempt(lambda run: self._log_artifact(run, message))
        elif "step" in message:
            self._attempt(lambda run: self._log_row(run, message))
        if changed := _summary_of(message):
            self._attempt(lambda run: run.summary.update(changed))

    def _keep(self, message: Message) -> None:
        """Keeps what a restarted service has to be given again."""
        self._summary |= _summary_of(message)
        if "step" in message:
            self._messages.append(message)
        elif "artifact" in message:
            self._artifacts[message["artifact"]] = message

    def _log_row(self, run: Any, message: Message) -> None:
        step = message["step"]
        row: int | None
        values: dict[str, Any]
        if "mark" in message:
            metric = message["mark"]
            row, values = self._rows.of_mark(metric, step=step), {metric: 1.0}
        elif "evaluation" in message:
            name, version, rewards = evaluation = _evaluation_of(message)
            row = self._rows.of_evaluation(evaluation, step=step)
            values = {f"eval/{name}/{VERSION}": version, **message["metrics"]}
            if rewards:
                values[f"eval/{name}/{REWARDS_VERSION}"] = rewards
        else:
            row = self._rows.of_step(step)
            values = {STEP: step, **message["metrics"]}
            if row is not None:
                values |= self._media(step, message["rollouts"])
        if row is not None:
            for name in values:
                self._define(run, name)
            run.log(values, step=row)

    def _define(self, run: Any, name: str) -> None:
        """Defines the axis of a metric, and of evaluations that their summary is set explicitly.

        W&B's own summaries are of the last row, or the best since the last start of its process,
        which after a resume is neither the exported version's value nor the best one.
        """
        first, *_ = parts = name.split("/")
        options: dict[str, Any] = {"hidden": True} if name == STEP else {}
        if len(parts) == 1:
            glob = name
        elif first == "eval":
            glob = f"eval/{parts[1]}/*"
            options = {"step_metric": f"eval/{parts[1]}/{VERSION}", "summary": "none"}
        else:
            glob, options = f"{first}/*", {"step_metric": STEP}
        if glob not in self._defined:
            self._defined.add(glob)
            run.define_metric(glob, **options)

    def _media(self, step: int, rollouts: str | None) -> dict[str, Any]:
        """The histograms of a step and, every few steps, its table."""
        if rollouts is None:
            return {}
        try:
            records = parse_rows(self._folder / "rollouts" / f"{rollouts}.jsonl")
            values = distributions(records)
            columns, rows = sample_table(records, step=step)
        except (DamagedFileError, KeyError) as error:
            self._send(failed=f"no table and histograms of step {step} ({_short(error)})")
            return {}
        media: dict[str, Any] = {
            name: wandb.Histogram(found, num_bins=_BINS) for name, found in values.items()
        }
        every, first = self._request["table_steps"]
        if rows and every and (step == first or step % every == 0):
            media["rollouts"] = wandb.Table(columns, rows)
        return media

    def _log_artifact(self, run: Any, message: Message) -> None:
        path = Path(message["path"])
        artifact = wandb.Artifact(
            message["artifact"], message["type"], metadata=message["metadata"]
        )
        files = (
            [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
        )
        sizes: dict[str, int] = {}
        referenced: list[str] = []
        try:
            if not files:
                raise FileNotFoundError(f"{path} is not on this host")
            for file in files:
                name = file.name if file == path else str(file.relative_to(path))
                size = file.stat().st_size
                if size > _LARGE_BYTES and not name.startswith(f"{_ADAPTER}/"):
                    artifact.add_reference(file.as_uri(), name=name, checksum=False)
                    referenced.append(name)
                else:
                    artifact.add_file(str(file), name=name, skip_cache=True)
                    sizes[name] = size
        except (OSError, ValueError) as error:  # or the next export replaces the folder
            self._send(failed=f"{message['artifact']} is not uploaded ({_short(error)})")
            return
        if self._logged_artifacts.get(message["artifact"]) == artifact.digest:
            return
        self._logged_artifacts[message["artifact"]] = artifact.digest
        run.log_artifact(artifact)
        if path.is_dir():
            self._send(
                artifact=message["artifact"],
                files=len(sizes),
                bytes=sum(sizes.values()),
                referenced=referenced,
            )

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

    def skip_offline_parts(self) -> None:
        """Makes `wandb sync` skip what earlier offline processes wrote: it is uploaded."""
        for file in run_files(self._folder, self._request["init"]["id"]):
            if file.parent.name.startswith("offline-"):
                file.with_name(f"{file.name}.synced").touch()


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
    temporary = request["temporary"]
    bound = threading.Thread(
        target=_end, args=(lines.fileno(), request["finish_s"], temporary), daemon=True
    )
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
    uploaded = reporter.online and not _upload_failed(printed)
    if uploaded:
        reporter.skip_offline_parts()
    send(uploaded=uploaded)
    shutil.rmtree(temporary, ignore_errors=True)
    out.close()
    # Skips wandb's exit handlers, which may never return.
    os._exit(0)


def _end(stdin: int, finish_s: float, temporary: str) -> None:
    """Ends this process `finish_s` after the other end of its stdin is closed."""
    poll = select.poll()
    poll.register(stdin, 0)  # hang-ups are always reported
    poll.poll()
    time.sleep(finish_s)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(1)


def _evaluation_of(message: Message) -> Evaluation:
    return message["evaluation"], message["version"], message["rewards_version"]


def _summary_of(message: Message) -> dict[str, Any]:
    """What a message changes in the summary; the best validation is given explicitly."""
    if message.get("evaluation", VALIDATION) != VALIDATION:
        return dict(message["metrics"])
    found: dict[str, Any] = message.get("summary", {})
    return found


def _upload_failed(printed: BinaryIO) -> bool:
    printed.seek(0)
    return _UPLOAD_FAILED in printed.read()


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:500] if str(error) else type(error).__name__


if __name__ == "__main__":
    main()
