"""How many cores this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Those that it is bound to; all of them where a system binds none, as macOS."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
