"""Reads the files that W&B writes of a run, with W&B's own reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_READ_S = 120.0
"""Time limit in seconds for one file."""


def run_files(folder: Path, run_id: str) -> list[Path]:
    """The files of a W&B run, one of each process that logged to it, oldest first.

    Args:
        folder: in which W&B has its folder `wandb`.
        run_id: of the W&B run.
    """
    found = (folder / "wandb").glob(f"*run-*-{run_id}*/run-{run_id}.wandb")
    # The folders' names hold the time of their start: run-20261123_142301-abc12345; a second start
    # within a second adds -1.
    return sorted(found, key=lambda file: file.parent.name.removeprefix("offline-"))


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records of a `.wandb` file: objects with `type` and, under that name, the content.

    What a killed process has left incomplete at the end is left out.

    Raises:
        OSError: if the reader cannot be started.
        subprocess.TimeoutExpired: if it does not end.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "wandb", "leet", "inspect", "--json", str(file)],
        env=os.environ | {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_READ_S,
        check=False,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
