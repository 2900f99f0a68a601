"""Number of cores, on every system."""

from __future__ import annotations

import os

import pytest

from pipeline.compute.builds import cores


def test_cores_are_those_of_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert cores() == 3


def test_a_system_without_affinity_counts_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert cores() == 7
