"""Weights & Biases: metrics go there if it works, and the run goes on if it does not."""

from __future__ import annotations

import contextlib
import logging
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from configs.schema import Config

Mode = Literal["online", "offline", "disabled"]
_LOG = logging.getLogger(__name__)


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


class Tracker:
    """A W&B run; after the first failure it says so and stays quiet.

    Args:
        config: settings; they become the run's config.
        mode: see `choose_mode`.
        folder: where wandb keeps its files.
        run_id: of the run to go on with; None: a new one.
    """

    def __init__(self, config: Config, *, mode: Mode, folder: Path, run_id: str | None) -> None:
        self.run_id = run_id
        self.address = "no address"
        self._run: Any = None
        attempts: dict[Mode, tuple[Mode, ...]] = {
            "online": ("online", "offline"),
            "offline": ("offline",),
            "disabled": (),
        }
        for attempt in attempts[mode]:
            try:
                self._start(config, attempt, folder)
            except Exception as error:  # noqa: BLE001  # tracking must never end a run
                _LOG.warning("W&B: cannot start %s (%s)", attempt, _short(error))
            else:
                break

    def _start(self, config: Config, mode: Mode, folder: Path) -> None:
        import wandb

        self._run = wandb.init(
            project=config.wandb.project,
            entity=config.wandb.entity,
            name=config.run.name,
            id=self.run_id,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=folder,
            config=config.model_dump(),
            settings=wandb.Settings(console="off", silent=True, init_timeout=60),
        )
        self.run_id = self._run.id
        self.address = self._run.url if mode == "online" else str(Path(self._run.dir).parent)

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Sends one step's metrics."""
        self._attempt(lambda run: run.log(dict(metrics), step=step))

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Sends what the run ends with."""
        self._attempt(lambda run: run.summary.update(dict(summary)))

    def finish(self, *, exit_status: int) -> None:
        """Waits until everything is written; W&B shows a run as failed unless the status is 0."""

        def finish(run: Any) -> None:
            import wandb

            run.finish(exit_code=exit_status)
            # Offline, `run.finish` returns before the run is on disk.
            wandb.teardown(exit_status)

        self._attempt(finish)
        self._run = None

    def _attempt(self, action: Any) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # noqa: BLE001  # tracking must never end a run
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        # Not rare: `ray job stop` signals every process of a job, wandb's service included.
        import wandb

        _LOG.warning("W&B: gave up (%s); metrics.jsonl has everything", _short(error))
        self._run = None
        with contextlib.suppress(Exception):
            wandb.teardown()  # else it fails, loudly, when Python exits


def _short(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
