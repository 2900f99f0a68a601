"""What a user sees of a run: on a terminal a view that is redrawn in place, elsewhere lines.

It begins with the process, before Ray starts, and keeps `status.json` up to date.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipeline.clock import Clock
from pipeline.run.record_files import TIME_FORMAT, write_atomically
from pipeline.run.status import Activity, Status, figures, phase_words, show_seconds, step_line
from pipeline.types import ShowProgress

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

STATUS_EVERY_S = 2.0
"""How often `status.json` is written."""
QUIET_S = 60.0
"""Without a terminal, seconds without a line after which a line says what the run does."""
_TICK_S = 0.25
_BAR = 40
"""Width of a progress bar in characters."""
_OWN_LINES = {"device_wait"}
"""Phases that say themselves what they wait for."""


class Console:
    """Shows a run; a context manager, inside of which the view is drawn and `status.json` written.

    Args:
        run: its name.
        clock: the run's; None: no time is shown.
        phase: reads the phase of this process, see `pipeline.clock`.
        status_file: path of `status.json`; None: it is not written.
        write: writes a line, where there is no terminal.
        now: reads the time of day.
    """

    def __init__(
        self,
        run: str = "",
        *,
        clock: Clock | None = None,
        phase: Callable[[], str | None] = lambda: None,
        status_file: Path | None = None,
        write: Callable[[str], None] = lambda text: print(text, flush=True),
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._clock, self._phase, self._file = clock, phase, status_file
        self._write, self._now = write, now
        self._status = Status(run)
        self._activities = dict[object, Activity]()
        self._ended: str | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="console", daemon=True)
        self._drawing = ExitStack()
        self._live: Live | None = None
        self._spoke_s = time.monotonic()

    def __enter__(self) -> Console:
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            self._live = self._drawing.enter_context(_drawn(lambda: view(self.status)))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._ended is None and kind is not None:
            refused = "refused" if issubclass(kind, ValueError | FileNotFoundError) else "failed"
            stopped = issubclass(kind, KeyboardInterrupt | SystemExit | asyncio.CancelledError)
            self._ended = "interrupted" if stopped else refused
        self._closed.set()
        self._thread.join()
        with suppress(OSError):  # the terminal is gone
            self._drawing.close()
        self._write_status()

    # --- what is shown

    @property
    def status(self) -> Status:
        """What the run does now."""
        with self._lock:
            status, activities = self._status, tuple(self._activities.values())
        phase = self._ended or self._phase() or status.phase
        elapsed_s = 0.0 if self._clock is None else self._clock.elapsed_s
        return replace(status, phase=phase, elapsed_s=elapsed_s, activities=activities)

    def update(self, **changes: Any) -> None:
        """Changes fields of the status."""
        with self._lock:
            self._status = replace(self._status, **changes)

    def end(self, how: str) -> None:
        """Shows how the run ended: "finished", "interrupted", "failed" or "refused"."""
        self._ended = how
        self.update(expected_end=None)

    def say(self, text: str) -> None:
        """Shows a line, on a terminal above the view; a lost terminal does not end the run."""
        self._spoke_s = time.monotonic()
        with suppress(OSError):
            if self._live is None:
                self._write(text)
            else:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step, counted from 1."""
        planned, end_s = metrics.get("budget/steps_planned"), metrics.get("budget/expected_end_s")
        changes: dict[str, Any] = {"step": step, "metrics": dict(metrics)}
        if planned is not None:
            changes["steps_planned"] = int(planned)
        if end_s is not None:
            changes["expected_end"] = self._now() + timedelta(seconds=end_s)
        if (left_s := metrics.get("budget/left_s")) is not None:
            changes["deadline_s"] = self.status.elapsed_s + left_s
        self.update(**changes)
        if self._live is None:
            self.say(self._stamped(step_line(self.status)))

    @contextmanager
    def activity(self, what: str, unit: str) -> Iterator[ShowProgress]:
        """Shows the progress of its block: what is done, or which process; `unit` is a plural."""
        key = object()

        def show(done: int, total: int) -> None:
            with self._lock:
                self._activities[key] = Activity(what, unit, done, total)

        try:
            yield show
        finally:
            with self._lock:
                self._activities.pop(key, None)

    def _stamped(self, text: str) -> str:
        return f"{self._now().strftime(TIME_FORMAT)} {text}"

    # --- in the background

    def _keep_up(self) -> None:
        """Draws the view, or says what the run does after a silence; writes `status.json`."""
        written_s = -STATUS_EVERY_S
        while not self._closed.wait(_TICK_S):
            status = self.status
            if self._live is not None:
                with suppress(OSError):  # the terminal is gone
                    self._live.refresh()
            elif time.monotonic() - self._spoke_s >= QUIET_S and status.phase not in _OWN_LINES:
                self.say(self._stamped(status.doing))
            if time.monotonic() - written_s >= STATUS_EVERY_S:
                written_s = time.monotonic()
                self._write_status()

    def _write_status(self) -> None:
        """Replaces `status.json`; a full disk or a lost folder does not end the run."""
        if self._file is not None:
            text = json.dumps(self.status.to_json(self._now()), indent=2) + "\n"
            with suppress(OSError):
                write_atomically(self._file, text.encode())


@contextmanager
def _drawn(render: Callable[[], RenderableType]) -> Iterator[Live]:
    """Draws on the terminal; what is printed or logged meanwhile appears above the view."""
    # Imported late: without a terminal it is not needed.
    from rich.live import Live

    live = Live(get_renderable=render, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
    with live:
        # A process that is killed must not leave the terminal without a cursor.
        live.console.show_cursor()
        yield live


def view(status: Status) -> RenderableType:
    """The view on a terminal."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def bar(done: int, total: int) -> ProgressBar:
        return ProgressBar(total, done, width=_BAR, complete_style="cyan", finished_style="cyan")

    rows = Table.grid(padding=(0, 2))
    rows.add_row()
    phase, elapsed = (phase_words(status.phase), "cyan"), (show_seconds(status.elapsed_s), "dim")
    head = Text.assemble((status.place, "bold"), "  ", phase, "  ", elapsed)
    rows.add_row(Text(status.run, "bold"), head)
    if status.steps_planned is not None:
        rows.add_row("", bar(status.step, status.steps_planned))
    for activity in status.activities:
        part = Table.grid(padding=(0, 2))
        part.add_row(bar(activity.done, activity.total), Text(activity.amount))
        rows.add_row(Text(activity.what, "cyan"), part)
    for label, text in figures(status):
        rows.add_row(Text(label, "dim"), Text(text))
    if (alarm := status.last_alarm) is not None:
        last = Text(f"step {alarm['step']}: {alarm['text']}", "yellow")
        rows.add_row(Text("last alarm", "dim"), last)
    return rows
