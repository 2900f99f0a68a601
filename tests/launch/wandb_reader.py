"""Reads back what a run has logged to W&B, from W&B's files and with W&B's own reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.run.run_folder import RunFolder
from tests.pipeline.run.wandb_files import read_records, run_files


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
