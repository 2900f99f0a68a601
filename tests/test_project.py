"""Consistency of the project's files: packages, lock files, CI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = ["requirements.txt", "requirements-tpu.txt", "requirements-cuda13.txt"]
PIN = re.compile(r"[a-z0-9-]+==[^ ;]+( ; [^@]+)?")


def pins(name: str) -> set[str]:
    """The pins of a lock file, without their platform markers."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {line.partition(" ; ")[0] for line in lines}


def names(pinned: set[str]) -> set[str]:
    return {pin.partition("==")[0] for pin in pinned}


def test_every_folder_with_python_files_is_a_package() -> None:
    layers = ("actors", "configs", "launch", "pipeline", "rewards")
    files = [path for layer in layers for path in (ROOT / layer).rglob("*.py")]
    assert {path.parent for path in files if not (path.parent / "__init__.py").is_file()} == set()


@pytest.mark.parametrize("name", [*LOCKS, "requirements-dev.txt"])
def test_lock_files_pin_exact_versions(name: str) -> None:
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        assert PIN.fullmatch(line), line


@pytest.mark.parametrize("name", LOCKS)
def test_lock_files_agree_with_the_development_lock(name: str) -> None:
    development = pins("requirements-dev.txt")
    shared = {pin for pin in pins(name) if pin.partition("==")[0] in names(development)}
    assert shared <= development
    assert pins("requirements.txt") <= pins(name)


def test_locks_add_the_packages_of_their_extra() -> None:
    # What `make test-accelerator` imports.
    check = {"pytest", "pytest-timeout", "beartype"}
    assert check | {"libtpu"} <= names(pins("requirements-tpu.txt"))
    assert check | {"jax-cuda13-plugin"} <= names(pins("requirements-cuda13.txt"))
    # `make install-rewards` and the like take their versions from here.
    optional = {"math-verify", "gcsfs", "s3fs", "gguf"}
    assert optional <= names(pins("requirements-dev.txt"))
    assert not (optional | {"libtpu"}) & names(pins("requirements.txt"))


def test_ci_runs_make_test() -> None:
    assert (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()[-1] == "exec make test"
