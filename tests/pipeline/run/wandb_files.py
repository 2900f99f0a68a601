"""Reads the files that W&B writes of a run, with W&B's own reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.run.run_folder import RunFolder


def run_files(folder: Path, run_id: str) -> list[Path]:
    """The files of a W&B run below `folder`, one of each process that logged to it, in order."""
    found = (folder / "wandb").glob(f"*run-*-{run_id}*/run-{run_id}.wandb")
    # The folders' names hold the time of their start: run-20261123_142301-abc12345; a second start
    # within a second adds -1.
    return sorted(found, key=lambda file: file.parent.name.removeprefix("offline-"))


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records of a `.wandb` file: objects with `type` and, under that name, the content."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "wandb", "leet", "inspect", "--json", str(file)],
        env=os.environ | {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120.0,
        check=False,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


class WandbFiles:
    """The records of all files of a run's W&B run, in their order."""

    def __init__(self, run: Path) -> None:
        self.folder = RunFolder(run)
        (self.id,) = {entry["wandb_id"] for entry in self.folder.events("started")}
        self.files = run_files(run, self.id)
        self.records = [record for file in self.files for record in read_records(file)]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [record["item"] for record in self.of("history")]

    @property
    def summary(self) -> dict[str, Any]:
        """The summary that the last process leaves."""
        found: dict[str, Any] = {}
        for record in read_records(self.files[-1]):
            if record["type"] == "summary":
                found |= record["summary"].get("update", {})
        return found

    def table(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The table in a row."""
        (file,) = (self.folder.path / "wandb").glob(f"offline-run-*/files/{row['rollouts.path']}")
        found: dict[str, Any] = json.loads(file.read_text())
        return found
