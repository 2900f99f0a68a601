"""A Hugging Face hub in memory, in place of the hub's client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete

LOGIN = {
    "type": "user",
    "name": "ann",
    "orgs": [{"type": "org", "name": "lab"}],
    "auth": {"type": "access_token", "accessToken": {"displayName": "push", "role": "write"}},
}


@dataclass
class Repo:
    """A repository: what it was made with, its files, and the titles of its commits."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class PushHub:
    """Answers as `HfApi` does.

    Attributes:
        login: answer of `whoami`, or the error that it raises.
        repos: by name.
        error: what a commit raises; None: it succeeds.
    """

    login: Mapping[str, Any] | Exception = field(default_factory=lambda: LOGIN)
    repos: dict[str, Repo] = field(default_factory=dict)
    error: Exception | None = None
    endpoint: str = "https://hub"

    def whoami(self) -> Mapping[str, Any]:
        if isinstance(self.login, Exception):
            raise self.login
        return self.login

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.repos.setdefault(name, Repo(private, {".gitattributes": b""}))

    def model_info(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(private=self.repos[name].private)

    def list_repo_files(self, name: str) -> list[str]:
        return list(self.repos[name].files)

    def create_commit(
        self,
        name: str,
        operations: Sequence[CommitOperationAdd | CommitOperationDelete],
        *,
        commit_message: str,
    ) -> None:
        if self.error is not None:
            raise self.error
        repo = self.repos[name]
        repo.commits.append(commit_message)
        for one in operations:
            if isinstance(one, CommitOperationAdd):
                repo.files[one.path_in_repo] = Path(str(one.path_or_fileobj)).read_bytes()
            else:
                del repo.files[one.path_in_repo]


def use(hub: PushHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes commands talk to the hub."""
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
