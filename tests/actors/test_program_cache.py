"""The compilation cache of several processes: what is shared, when, and what is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors import program_cache
from actors.program_cache import ProgramCache


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*-cache")}


def test_an_entry_is_shared_when_it_is_whole(tmp_path: Path):
    one, other = ProgramCache(tmp_path), ProgramCache(tmp_path)
    (one.path / "a-cache").write_bytes(b"program a")
    assert names(tmp_path) == set()
    one.share()
    assert names(tmp_path) == {"a-cache"}
    assert (one.path / "a-cache").read_bytes() == b"program a"
    # Who began before does not see it, who begins now does.
    assert names(other.path) == set()
    assert (ProgramCache(tmp_path).path / "a-cache").read_bytes() == b"program a"


def test_two_processes_with_the_same_program_share_one(tmp_path: Path):
    one, other = ProgramCache(tmp_path), ProgramCache(tmp_path)
    for process in (one, other):
        (process.path / "a-cache").write_bytes(b"program a")
    one.share()
    other.share()
    assert names(tmp_path) == {"a-cache"}
    assert (one.path / "a-cache").read_bytes() == b"program a"


def test_what_a_killed_process_has_half_written_is_gone(tmp_path: Path):
    killed, alive = ProgramCache(tmp_path), ProgramCache(tmp_path)
    (killed.path / "a-cache").write_bytes(b"prog")
    os.close(killed._lock)  # as the kernel does
    ProgramCache(tmp_path)
    assert not killed.path.exists()
    assert alive.path.exists()
    assert names(tmp_path) == set()


def test_the_oldest_are_deleted_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(program_cache, "MOST_BYTES", 25)
    process = ProgramCache(tmp_path)
    for age, name in enumerate(("new", "middle", "old")):
        entry = tmp_path / f"{name}-cache"
        entry.write_bytes(10 * b"x")
        os.utime(entry, (1000 - age, 1000 - age))
    process.share()
    assert names(tmp_path) == {"new-cache", "middle-cache"}
