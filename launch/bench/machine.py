"""Description of the machine and the software versions of a measurement."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from pathlib import Path

from pipeline.contracts.builds import cores

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "google-tunix", "qwix")


def machine() -> dict[str, str]:
    """Returns date, processor, cores, and the versions of compilers and libraries."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{_processor()}, {cores()} cores",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(_version(name) for name in _PACKAGES)]
        ),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def available_bytes() -> int:
    """Returns the memory that is free or can be freed."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
