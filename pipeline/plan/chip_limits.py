"""Speeds of this host's chips as `make test-accelerator` measured them, kept for later plans.

One file for each host and kind of chip in the cache folder. A plan uses them in place of the
published limits (`cost_model.hardware.topology_of`).
"""

from __future__ import annotations

import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from pipeline.run.cache_folder import cache_folder, read_cached_json, write_cached_json


@dataclass(frozen=True)
class ChipLimits:
    """Measured speeds of a chip.

    Attributes:
        bytes_per_s: memory bandwidth, reading and writing.
        bf16_flops: operations per second of bfloat16 products.
        int8_flops: the same in 8 bits.
        measured: date and time, ISO 8601.
    """

    bytes_per_s: float
    bf16_flops: float
    int8_flops: float
    measured: str


_JSON = TypeAdapter(ChipLimits)


def load_limits(chip: str) -> ChipLimits | None:
    """The measured speeds of this host's chips of a kind; None: they were not measured.

    Args:
        chip: name of the kind, as `cost_model.hardware.Chip` has it.
    """
    content = read_cached_json(_file(chip))
    if content is None:
        return None
    try:
        return _JSON.validate_python(content["limits"])
    except (KeyError, ValueError):  # written by another version
        return None


def save_limits(chip: str, limits: ChipLimits) -> bool:
    """Replaces the measured speeds; returns false if the cache folder cannot be written."""
    write_cached_json(_file(chip), {"limits": asdict(limits)})
    return load_limits(chip) == limits


def _file(chip: str) -> Path:
    name = re.sub(r"[^\w.-]", "_", f"{platform.node()}-{chip}")
    return cache_folder("chip_limits") / f"{name}.json"
