"""A fingerprint of a model's weights: tells another base from the same one in milliseconds."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLES, _SAMPLE = 2**12, 2**12
"""Of each file at most about this number of samples of this size, in bytes, are hashed."""


def weights_fingerprint(folder: Path) -> str:
    """A hash of names, sizes and samples of a model's weight files, and of its `config.json`.

    Files up to 16 MiB are read whole, larger ones at 4,096 evenly spaced places of 4 KiB. Training
    changes some of them; a few damaged bytes elsewhere are not noticed.

    Args:
        folder: a Hugging Face folder, or one of a flax checkpoint.

    Raises:
        OSError: if a file cannot be read.
    """
    files = list(folder.glob("*.safetensors"))
    files = [*files, folder / "config.json"] if files else list(folder.rglob("*"))
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in files if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()} {size}\n".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(_SAMPLE, size // _SAMPLES)):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
