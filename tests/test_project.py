"""What the project's own files promise each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = ["requirements.txt", "requirements-tpu.txt", "requirements-cuda13.txt"]
PIN = re.compile(r"[a-z0-9-]+==[^ ;]+( ; [^@]+)?")


def pins(name: str) -> set[str]:
    """The pins of a lock file, without the platforms they are for."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {line.partition(" ; ")[0] for line in lines}


def names(pinned: set[str]) -> set[str]:
    return {pin.partition("==")[0] for pin in pinned}


def test_every_folder_with_python_files_is_a_package() -> None:
    layers = ("actors", "configs", "launch", "pipeline", "rewards")
    files = [path for layer in layers for path in (ROOT / layer).rglob("*.py")]
    assert {path.parent for path in files if not (path.parent / "__init__.py").is_file()} == set()


@pytest.mark.parametrize("name", [*LOCKS, "requirements-dev.txt"])
def test_a_lock_has_nothing_but_exact_versions(name: str) -> None:
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        assert PIN.fullmatch(line), line


@pytest.mark.parametrize("name", LOCKS)
def test_the_locks_agree_with_the_development_lock(name: str) -> None:
    development = pins("requirements-dev.txt")
    shared = {pin for pin in pins(name) if pin.partition("==")[0] in names(development)}
    assert shared <= development
    assert pins("requirements.txt") <= pins(name)


def test_accelerator_locks_add_what_their_extra_names() -> None:
    assert "libtpu" in names(pins("requirements-tpu.txt"))
    assert "jax-cuda13-plugin" in names(pins("requirements-cuda13.txt"))
    assert "libtpu" not in names(pins("requirements.txt"))


def test_the_integration_runs_the_test_command() -> None:
    assert (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()[-1] == "exec make test"
