"""Invariant 8 on the ledger of a real run."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.run.ledger import ROWS, Seconds, Sums, read_ledger

MOST_UNEXPLAINED = 0.02


def check_ledger(run: Path) -> tuple[Seconds, Counter[str]]:
    """Checks that every second of every process has a row; returns seconds by kind, and tokens."""
    accounts, sums = read_ledger(run / "ledger.jsonl"), Sums()
    assert accounts[0].start_s == pytest.approx(0, abs=1e-6)  # a difference of unix times
    for earlier, later in pairwise(accounts):
        assert later.start_s == pytest.approx(earlier.end_s)
    for one in accounts:
        for rows in one.seconds.values():
            assert sum(rows.values()) == pytest.approx(one.end_s - one.start_s, abs=1e-3)
        sums.add(one)
    found = {row for rows in sums.seconds.values() for row in rows}
    assert found <= set(ROWS)
    total = sum(sum(rows.values()) for rows in sums.seconds.values())
    unexplained = sum(rows.get("unexplained", 0.0) for rows in sums.seconds.values())
    assert unexplained <= MOST_UNEXPLAINED * total
    processes = len(accounts[-1].seconds)
    # A process that never reported, because the run ended before, is not in the ledger.
    assert total == pytest.approx(accounts[-1].end_s * processes, rel=1e-6)
    return sums.seconds, sums.tokens
