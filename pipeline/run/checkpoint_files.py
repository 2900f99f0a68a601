"""What is in the `checkpoints/` folder of a run, read without JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEST, BEST_FILE = "best", "adapter.safetensors"
"""Folder and file of the best adapter by validation in `checkpoints/`."""
CHECKPOINT_MARK = "_CHECKPOINT_METADATA"
"""A file that Orbax puts into each checkpoint."""


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint of a run after `step` training steps; see `pipeline.run.history.provenance`."""

    step: int
    path: Path
    num_bytes: int
    adapter_sha256: str
    provenance: Mapping[str, Any] = field(default_factory=dict)


def read_checkpoints(folder: Path) -> list[CheckpointFiles]:
    """The checkpoints in a `checkpoints/` folder, oldest first; incomplete ones do not count."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]
    found = (_read(path) for path in sorted(paths, key=lambda path: int(path.name)))
    return [one for one in found if one is not None]


def _read(path: Path) -> CheckpointFiles | None:
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        facts = json.loads((path / "facts" / "metadata").read_bytes())
        return CheckpointFiles(
            int(path.name),
            path,
            folder_bytes(path),
            facts["adapter_sha256"],
            facts["meta"].get("provenance", {}),
        )
    return None


def folder_bytes(folder: Path) -> int:
    """The size of all files below a folder; those that vanish meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
    return total


def best_version(checkpoints: Path) -> int | None:
    """The version of the best adapter by validation; None if there is none."""
    version = _best_facts(checkpoints / BEST).get("version")
    return None if version is None else int(version)


def adapter_sha256(checkpoint: Path) -> str | None:
    """The recorded hash of the adapter of a checkpoint, or of `BEST`; None if it is unknown."""
    if checkpoint.name == BEST:
        return _best_facts(checkpoint).get("sha256")
    found = _read(checkpoint)
    return None if found is None else found.adapter_sha256


def _best_facts(folder: Path) -> Mapping[str, str]:
    """Version and hash of the best adapter; empty if there is none."""
    from safetensors import SafetensorError, safe_open  # not for those who only list protocols

    try:
        with safe_open(folder / BEST_FILE, framework="numpy") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}
