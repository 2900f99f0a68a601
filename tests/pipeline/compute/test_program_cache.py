"""The compilation cache of several processes: sharing, deletion, and killed processes."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
from jax._src.lru_cache import LRUCache

from pipeline.compute import program_cache
from pipeline.compute.program_cache import ProgramCache
from tests.full_disk import fill_disk


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*-cache")}


def test_an_entry_is_shared_when_it_is_complete(tmp_path: Path):
    one, other = ProgramCache(tmp_path), ProgramCache(tmp_path)
    (one.path / "a-cache").write_bytes(b"program a")
    assert names(tmp_path) == set()
    one.share()
    assert names(tmp_path) == {"a-cache"}
    assert (one.path / "a-cache").read_bytes() == b"program a"
    # New processes see it, and those that started earlier when they ask.
    assert (ProgramCache(tmp_path).path / "a-cache").read_bytes() == b"program a"
    assert names(other.path) == set()
    other.fetch()
    assert (other.path / "a-cache").read_bytes() == b"program a"


def test_a_program_that_does_not_fit_on_the_disk_is_written_again(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = ProgramCache(small_disk)
    monkeypatch.setattr(program_cache, "_of_this_process", lambda: cache)
    program = zlib.compress(os.urandom(9000))
    ballast = fill_disk(small_disk)
    jax_cache = LRUCache(str(cache.path), max_size=-1)
    with pytest.raises(OSError, match="No space left on device"):  # JAX warns
        jax_cache.put("a", program)
    program_cache.share_programs()
    assert names(small_disk) == set()
    ballast.unlink()
    jax_cache.put("a", program)
    program_cache.share_programs()
    assert (small_disk / "a-cache").read_bytes() == program


def test_an_entry_deleted_by_another_process_stays_available(tmp_path: Path):
    (tmp_path / "a-cache").write_bytes(b"program a")
    process = ProgramCache(tmp_path)
    (process.path / "b-cache").write_bytes(b"program b")
    process.share()
    for name in ("a-cache", "b-cache"):
        (tmp_path / name).unlink()
    # JAX reads existing entries and never writes them.
    jax_cache = LRUCache(str(process.path), max_size=-1)
    assert jax_cache.get("a") == b"program a"
    jax_cache.put("a", b"another")
    assert jax_cache.get("b") == b"program b"
    assert names(tmp_path) == set()
    # A deleted entry that was shared once is not shared again.
    process.share()
    assert names(tmp_path) == set()


def test_a_partial_entry_of_a_killed_process_is_removed(tmp_path: Path):
    killed, alive = ProgramCache(tmp_path), ProgramCache(tmp_path)
    (killed.path / "a-cache").write_bytes(b"prog")
    os.close(killed._own._lock)  # as the kernel does when a process is killed
    ProgramCache(tmp_path)
    assert not killed.path.exists()
    assert alive.path.exists()
    assert names(tmp_path) == set()


def test_the_oldest_entries_are_deleted_beyond_the_size_limit(
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
