"""The version of the code that runs."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

_PACKAGES = ("configs", "rewards", "pipeline", "actors", "launch")


def code_version() -> str:
    """Version of the package and hash of its sources: `0.1.0+3f2a91c0d4e5`."""
    version, root, digest = "", Path(__file__).parents[1], hashlib.sha256()
    with suppress(metadata.PackageNotFoundError):  # run from the sources
        version = f"{metadata.version('gemma-grpo')}+"
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return version + digest.hexdigest()[:12]
