"""Files that flags name: their paths, and refusals before the work."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from configs.base import HOME_VARIABLE
from launch.flags import output_file


def test_a_file_is_resolved_like_paths_of_a_configuration_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.json").write_text("old")
    assert (
        output_file("--json", "a.json") == output_file("--json", "~/a.json") == tmp_path / "a.json"
    )
    assert (tmp_path / "a.json").read_text() == "old"


def test_a_file_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, told in (
        (tmp_path, f"{tmp_path} is a folder; name a file"),
        ("gs://bucket/a.json", "gs:// is not supported; "),
        (tmp_path / "no" / "a.json", f"no folder {tmp_path / 'no'}"),
        (file / "a.json", f"no folder {file}"),
        (file, f"{file} cannot be written"),
    ):
        if path == file:  # root may write anywhere
            monkeypatch.setattr(os, "access", lambda *_: False)
        with pytest.raises(ValueError, match=f"^command line: --json: {re.escape(told)}"):
            output_file("--json", str(path))
