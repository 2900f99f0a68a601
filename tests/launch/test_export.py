"""`launch.export --push`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError

from launch.exits import Failure
from launch.push import check_push, push


class Hub:
    """Answers as `HfApi` does; the errors are those of `whoami` and of `upload_folder`."""

    endpoint = "https://hub"

    def __init__(self) -> None:
        self.login: Exception | None = None
        self.upload: Exception | None = None
        self.pushed: list[dict[str, Any]] = []

    def whoami(self) -> None:
        if self.login is not None:
            raise self.login

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        assert (name, private, exist_ok) == ("ann/tuned", True, True)

    def upload_folder(self, **given: Any) -> None:
        if self.upload is not None:
            raise self.upload
        self.pushed.append(given)


def test_an_export_is_pushed_or_stays_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    assert check_push("hf://ann/tuned") == "ann/tuned"
    for hub.login, told in (
        (LocalTokenNotFoundError(), "there is no login; log in with"),
        (httpx.ConnectError("nobody answers"), "the hub cannot be reached, or refuses"),
    ):
        with pytest.raises((ValueError, Failure), match=told):
            check_push("hf://ann/tuned")
    hub.upload = httpx.ConnectError("the connection broke")
    with pytest.raises(Failure, match="is complete; push it with: hf upload ann/tuned /"):
        push(tmp_path, "ann/tuned", private=True, title="demo")
    hub.upload = None
    push(tmp_path, "ann/tuned", private=True, title="demo")
    assert capsys.readouterr().out.endswith("pushed: https://hub/ann/tuned\n")
    (given,) = hub.pushed
    assert (given["folder_path"], given["commit_message"]) == (tmp_path, "demo")
    assert "adapter/*" in given["delete_patterns"]  # of an earlier export
