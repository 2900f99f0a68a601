"""`launch.export --push`: refusals, one commit, files of an earlier export."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from huggingface_hub import errors

from launch.exits import Failure
from launch.push import Repository, find_repository, push
from tests.launch.push_hub import PushHub

NAME = "ann/tuned"
REPOSITORY = Repository(NAME, private=True)
FILES = {
    "README.md": b"---\ntags: []\n---\n# tuned\n",
    "config.json": b"{}\n",
    "model-00001-of-00002.safetensors": b"1" * 3000,
    "model-00002-of-00002.safetensors": b"2" * 2000,
    "model.safetensors.index.json": b'{"weight_map": {}}\n',
    "adapter/adapter_model.safetensors": b"a" * 100,
}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """The folder of an export with several weight files."""
    for name, content in FILES.items():
        file = tmp_path / "export" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return tmp_path / "export"


def test_an_export_is_pushed_in_one_commit(
    hub: PushHub, export: Path, capsys: pytest.CaptureFixture[str]
):
    push(export, REPOSITORY, title="demo, checkpoint best")
    repo = hub.repos[NAME]
    assert repo.files == {".gitattributes": b"", **FILES}
    assert repo.commits == ["demo, checkpoint best"]
    assert repo.private
    assert capsys.readouterr().out.splitlines() == [
        "pushing 6 files to hf://ann/tuned (private)",
        "pushed: https://hub/ann/tuned",
    ]


def status(number: int) -> errors.HfHubHTTPError:
    """The hub's answer with this status."""
    answer = httpx.Response(number, request=httpx.Request("POST", "https://hub"))
    return errors.HfHubHTTPError("refused", response=answer)


def test_a_push_that_fails_says_what_to_do(hub: PushHub, export: Path):
    for hub.error, remedy in (
        (httpx.ConnectError("the connection broke"), "push it with: hf upload ann/tuned /"),
        (status(403), "log in with `hf auth login`.*, with a token that may write there"),
    ):
        what = rf"^hf://ann/tuned: not pushed: .*; .*/export is complete; {remedy}"
        with pytest.raises(Failure, match=what) as broken:
            push(export, REPOSITORY, title="first")
        assert broken.value.status == 1
    hub.error = None
    push(export, REPOSITORY, title="second")
    assert hub.repos[NAME].commits == ["second"]


def test_weights_of_an_earlier_export_are_deleted_and_other_files_kept(
    hub: PushHub, export: Path, capsys: pytest.CaptureFixture[str]
):
    push(export, REPOSITORY, title="in two files")
    hub.repos[NAME].files["curves.png"] = b"of the user"
    for file in export.glob("model*"):
        file.unlink()
    (export / "model.safetensors").write_bytes(b"merged")
    capsys.readouterr()
    push(export, Repository(NAME, private=False), title="in one file")
    kept = {name for name in FILES if not name.startswith("model")}
    expected = {".gitattributes", "curves.png", "model.safetensors"} | kept
    assert hub.repos[NAME].files.keys() == expected
    shown = capsys.readouterr().out
    assert "deleting files of an earlier export: model-00001-of-00002.safetensors, model-0" in shown
    assert "to hf://ann/tuned (private)" in shown  # it existed


@pytest.mark.parametrize(
    ("handle", "login", "what"),
    [
        ("ann/tuned", None, "--push ann/tuned: write hf://USER/NAME"),
        ("hf://ann/tuned@main", None, "--push hf://ann/tuned@main: write hf://USER/NAME"),
        ("hf://ann/a..b", None, "--push hf://ann/a..b: is not a valid name: "),
        ("hf://bob/tuned", None, "this login may not write to bob, only to ann, lab; name one"),
        ("hf://ann/tuned", errors.LocalTokenNotFoundError(), "there is no login; log in with `hf"),
        ("hf://ann/tuned", status(401), "the hub refuses this login; log in again with `hf auth"),
    ],
)
def test_who_may_not_push_is_told_before_any_work(
    hub: PushHub, handle: str, login: Exception | None, what: str
):
    hub.login = login or hub.login
    with pytest.raises(ValueError, match=r"^--push ") as refused:
        find_repository(handle, private=True)
    assert what in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert hub.repos == {}


def test_a_user_pushes_to_own_and_organizations_repositories(hub: PushHub):
    assert find_repository("hf://Ann/tuned", private=True) == Repository("ann/tuned", private=True)
    assert find_repository("hf://lab/tuned", private=False).name == "lab/tuned"
    hub.login = httpx.ConnectError("nobody answers")
    with pytest.raises(Failure, match=r"^--push hf://ann/tuned: the hub cannot be reached: ") as no:
        find_repository("hf://ann/tuned", private=True)
    assert no.value.status == 1
