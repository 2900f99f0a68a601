"""What is in the `checkpoints/` folder of a run, read without JAX."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.contracts.record_files import read_json, write_json

BEST, BEST_FILE = "best", "adapter.safetensors"
"""Folder and file of the best adapter by validation in `checkpoints/`."""
HASHES = "files.json"
"""The hash of each other file of a checkpoint."""
_REQUIRED = ("_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt")
"""Files without which Orbax cannot read a checkpoint."""


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint of a run.

    Attributes:
        step: training steps before it; the policy version.
        path: its folder.
        unix_s: when it was complete.
        num_bytes: size on disk.
        adapter_sha256: hash of the adapter; None if unknown.
        provenance: hashes of what the run read, see `pipeline.run.history.provenance`.
        problem: why it cannot be used; None if its files are complete. What is in them is checked
            by hash when it is restored.
    """

    step: int
    path: Path
    unix_s: float
    num_bytes: int
    adapter_sha256: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


def read_checkpoints(folder: Path) -> list[CheckpointFiles]:
    """The checkpoints in a `checkpoints/` folder, oldest first; incomplete ones do not count."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]
    return [_read(path) for path in sorted(paths, key=lambda path: int(path.name))]


def _read(path: Path) -> CheckpointFiles:
    facts_file = path / "facts" / "metadata"
    found = CheckpointFiles(int(path.name), path, path.stat().st_mtime, folder_bytes(path))
    missing = [name for name in _REQUIRED if not (path / name).is_file()]
    problem = f"{missing[0]} is missing" if missing else None
    try:
        facts = json.loads(facts_file.read_bytes())
        if facts["version"] != found.step:
            problem = f"it is of version {facts['version']}"
        return CheckpointFiles(
            found.step,
            path,
            facts_file.stat().st_mtime,
            found.num_bytes,
            facts["adapter_sha256"],
            facts["meta"].get("provenance", {}),
            problem,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return CheckpointFiles(
            found.step, path, found.unix_s, found.num_bytes, problem="facts/metadata is damaged"
        )


def write_hashes(checkpoint: Path) -> None:
    """Writes the hashes of the files of a checkpoint, which are complete."""
    write_json(checkpoint / HASHES, {"files": _file_hashes(checkpoint)})


def check_files(checkpoint: Path) -> None:
    """Finds damage before Orbax does, which reads arrays side by side and stops at the first error.

    TensorStore would report the others later, to an event loop that is closed: with tracebacks.
    Nothing is checked where a process was killed before it wrote the hashes.

    Raises:
        ValueError: if a file has changed, or is missing.
        OSError: if a file cannot be read now.
    """
    known = read_json(checkpoint / HASHES)
    if known is None:
        return
    found = _file_hashes(checkpoint)
    for name, sha256 in known["files"].items():
        if found.get(name) != sha256:
            raise ValueError(f"{name} {'has changed' if name in found else 'is missing'}")


def _file_hashes(folder: Path) -> dict[str, str]:
    """The hash of each file by its path in `folder`."""
    paths = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.name != HASHES
    }


def folder_bytes(folder: Path) -> int:
    """The size of all files below a folder; those that vanish meanwhile do not count."""
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                yield path.stat().st_size
        except FileNotFoundError:
            continue


def best_version(checkpoints: Path) -> int | None:
    """The version of the best adapter by validation; None if there is none, or it is damaged."""
    try:
        return int(_best_facts(checkpoints / BEST)["version"])
    except (KeyError, ValueError):
        return None


def adapter_sha256(checkpoint: Path) -> str | None:
    """The recorded hash of the adapter of a checkpoint, or of `BEST`; None if it is unknown."""
    if checkpoint.name == BEST:
        return _best_facts(checkpoint).get("sha256")
    return _read(checkpoint).adapter_sha256


def _best_facts(folder: Path) -> Mapping[str, str]:
    """Version and hash of the best adapter; empty if there is none, or it is damaged."""
    from safetensors import SafetensorError, safe_open  # not for those who only list protocols

    try:
        with safe_open(folder / BEST_FILE, framework="numpy") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}
