"""An adapter in one safetensors file, by parameter name: float32, with version and hash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pipeline.compute.model import lora
from pipeline.run.checkpoint_files import BEST_FILE


def write_adapter_file(folder: Path, adapter: Mapping[str, np.ndarray], *, version: int) -> None:
    """Replaces the adapter in `folder` atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{BEST_FILE}.tmp"
    tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in adapter.items()}
    facts = {"version": str(version), "sha256": lora.sha256(adapter)}
    save_file(tensors, partial, metadata=facts)
    partial.replace(folder / BEST_FILE)


def read_adapter_file(folder: Path) -> tuple[dict[str, np.ndarray], int]:
    """The adapter in `folder` and its version.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is no such file.
    """
    path = folder / BEST_FILE
    try:
        with safe_open(path, framework="numpy") as file:
            version = int((file.metadata() or {})["version"])
            adapter = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return adapter, version
