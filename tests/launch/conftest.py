"""Fixtures of requests that need no devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.demo_texts import write_tokenizer
from tests.launch.small_run import write_request


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small tokenizer."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def request_path(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of a small valid request, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEMMA_GRPO_HOME", raising=False)
    return write_request(tmp_path, tokenizer=tokenizer)
