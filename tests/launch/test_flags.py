"""Files that flags name: their paths, and refusals before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs.base import HOME_VARIABLE
from launch.flags import output_file


@pytest.mark.parametrize(
    ("file", "there"), [("a.json", "home/a.json"), ("~/a.json", "user/a.json")]
)
def test_a_file_is_resolved_like_paths_of_a_configuration_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, there: str
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / there).parent.mkdir()
    assert output_file("--json", file) == tmp_path / there
    assert not (tmp_path / there).exists()
    (tmp_path / there).write_text("old")
    assert output_file("--json", file) == tmp_path / there
    assert (tmp_path / there).read_text() == "old"


def test_a_file_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(ValueError, match=r"^command line: --json: ") as caught:
            output_file("--json", str(path))
        return str(caught.value).removeprefix("command line: --json: ")

    file = tmp_path / "file"
    file.touch()
    assert refused(tmp_path) == f"{tmp_path} is a folder; name a file"
    with pytest.raises(ValueError, match=r"^command line: --json: gs:// is not supported; "):
        output_file("--json", "gs://bucket/a.json")
    assert refused(tmp_path / "no" / "a.json") == f"no folder {tmp_path / 'no'}"
    assert refused(file / "a.json") == f"no folder {file}"
    # Root may write anywhere.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert refused(file) == f"{file} cannot be written"
