"""Atomic exchange of two folders."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)


def exchange(one: Path, other: Path) -> None:
    """Exchanges two folders of one file system.

    Atomic on Linux with the usual file systems; elsewhere by three renames, between which a killed
    process leaves the content of `other` as NAME.old.
    """
    if not _exchange_atomically(one, other):
        aside = other.with_name(other.name + ".old")
        shutil.rmtree(aside, ignore_errors=True)
        other.rename(aside)
        one.rename(other)
        aside.rename(one)


def _exchange_atomically(one: Path, other: Path) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    status: int = rename(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_EXCHANGE)
    )
    return status == 0
