"""The cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.run.cache_folder import cache_folder


@pytest.fixture(autouse=True)
def _home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("GEMMA_GRPO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_environment_variable_sets_the_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder("plans") == Path("/cache/gemma-grpo/plans")
    monkeypatch.setenv("GEMMA_GRPO_CACHE", "~/ours")
    assert cache_folder("xla") == Path("/home/me/ours/xla")
