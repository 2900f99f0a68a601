"""Exchange of two folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.compute.learner import exchange
from pipeline.compute.learner.exchange import exchange as swap


def folders(tmp_path: Path) -> tuple[Path, Path]:
    made = tmp_path / "export.tmp", tmp_path / "export"
    for folder in made:
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    return made


@pytest.mark.parametrize("atomic", [True, False])
def test_invariant_10_two_folders_are_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool
):
    fresh, old = folders(tmp_path)
    if not atomic:
        monkeypatch.setattr(exchange, "_exchange_atomically", lambda *_: False)
        (tmp_path / "export.old").mkdir()
    swap(fresh, old)
    assert (fresh / "name").read_text() == "export"
    assert (old / "name").read_text() == "export.tmp"
    assert {path.name for path in tmp_path.iterdir()} == {"export", "export.tmp"}


def test_this_system_exchanges_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not sys.platform.startswith("linux"):
        pytest.skip("atomic exchange is implemented for Linux only")
    fresh, old = folders(tmp_path)
    monkeypatch.setattr(Path, "rename", None)
    swap(fresh, old)
    assert (old / "name").read_text() == "export.tmp"
