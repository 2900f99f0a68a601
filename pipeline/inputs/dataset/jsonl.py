"""Reads JSONL line by line, so that each broken line is reported by number and reason."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.inputs.dataset.rows import Malformed, Row


def parse_jsonl(path: Path, *, limit: int | None) -> tuple[list[Row], list[Malformed]]:
    """The objects of a file, and what its other lines are; blank lines are no rows.

    Args:
        path: the file.
        limit: read at most this many rows, malformed ones included.
    """
    rows, malformed = list[Row](), list[Malformed]()
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        if limit is not None and len(rows) + len(malformed) == limit:
            break
        try:
            value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError:
            malformed.append(Malformed(number, "not UTF-8"))
        except (ValueError, RecursionError) as error:
            malformed.append(Malformed(number, f"not JSON: {error}"))
        else:
            if isinstance(value, dict):
                rows.append(Row(number, value))
            else:
                kind = type(value).__name__
                malformed.append(Malformed(number, f"not an object with columns but a {kind}"))
    return rows, malformed
