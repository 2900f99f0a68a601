"""Damaged input ends commands in a sentence: a share of `launch.bench fuzz`."""

from __future__ import annotations

import pytest

from launch.bench.fuzz import KINDS, run_case

pytestmark = pytest.mark.slow

SEEDS = range(1000, 1008)
"""Seeds that the benchmark does not use."""


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_input_never_gives_a_traceback(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = [(seed, one) for seed in SEEDS for one in run_case(kind, seed)]
    assert [(seed, one) for seed, one in found if one["wrong"]] == []
