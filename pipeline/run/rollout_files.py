"""Reads the files in `rollouts/`, checked with the digests that journal and metrics have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.contracts.record_files import FileDigest, parse_rows

ROLLOUTS = "rollouts"
"""Key of a row of `metrics.jsonl`: the digest of the file of the step's rollouts."""

Row = Mapping[str, Any]


class RecordedRollouts:
    """The files of rollouts, answers and demonstrations of a run.

    Args:
        folder: `rollouts/`.
        journal: of the run; has the digests of answers.
        metrics: of the run; have the digests of the rollouts of steps.
    """

    def __init__(self, folder: Path, journal: Iterable[Row], metrics: Iterable[Row]) -> None:
        self._folder = folder
        answers = {one["file"]: one for one in journal if one.get("file")}
        steps = {f"step_{row['step']:06d}": row[ROLLOUTS] for row in metrics if ROLLOUTS in row}
        self._digests = {
            name: FileDigest(found["rows"], found["sha256"])
            for name, found in {**answers, **steps}.items()
        }

    @property
    def missing(self) -> list[str]:
        """Names of files that have a digest, and do not exist; ascending."""
        return sorted(name for name in self._digests if not self.path(name).is_file())

    def path(self, name: str) -> Path:
        """The file of this name."""
        return self._folder / f"{name}.jsonl"

    def read(self, name: str) -> list[dict[str, Any]]:
        """The objects of `NAME.jsonl`.

        Raises:
            DamagedFileError: if it is missing or differs from what was written; without a recorded
                digest, if it is not JSONL.
        """
        path, digest = self.path(name), self._digests.get(name)
        return parse_rows(path) if digest is None else digest.read(path)
