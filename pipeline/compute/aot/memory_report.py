"""What a program holds of each memory, read from the report that XLA writes beside a dump.

The report counts arguments, results and temporaries as they are laid out, gaps included; this is
what the compiler holds against the memory there is. `memory_analysis()` counts the temporaries of
loops twice with libtpu 0.0.42.
"""

from __future__ import annotations

import re

HBM = "default"
"""The accelerator's own memory."""

_SPACE = re.compile(r"^Memory Space: (\S+).*\nTotal bytes: (\d+)", re.MULTILINE)


def memory_spaces(report: str) -> dict[str, int]:
    """Bytes by memory space.

    Raises:
        ValueError: if the text is not such a report.
    """
    found = {name: int(size) for name, size in _SPACE.findall(report)}
    if HBM not in found:
        raise ValueError(f"no memory space {HBM!r} in this report: {report[:200]!r}")
    return found
