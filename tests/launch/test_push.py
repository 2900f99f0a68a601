"""`launch.export --push`: refusals, pushes, pushes that broke off, old files, verification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launch.exits import Failure
from launch.push import RECORD, Repository, find_repository, push
from pipeline.run.record_files import write_json
from tests.launch.push_hub import OLD_HTTPX, PushHub

pytestmark = OLD_HTTPX
NAME = "ann/tuned"
REPOSITORY = Repository(NAME, private=True)
FILES = {
    "README.md": b"---\ntags: []\n---\n# tuned\n",
    "config.json": b"{}\n",
    "model-00001-of-00003.safetensors": b"1" * 3000,
    "model-00002-of-00003.safetensors": b"2" * 2000,
    "model-00003-of-00003.safetensors": b"3" * 1000,
    "model.safetensors.index.json": b'{"weight_map": {}}\n',
    "adapter/adapter_model.safetensors": b"a" * 100,
}
LARGE = [100, 3000, 2000, 1000]
"""Sizes of the files that LFS uploads, in the order of their names."""


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
    assert repo.files == {".gitattributes": repo.files[".gitattributes"], **FILES}
    assert repo.commits == ["demo, checkpoint best"]
    assert repo.private
    assert sorted(hub.uploads) == sorted(LARGE)
    assert capsys.readouterr().out.splitlines() == [
        "pushing 7 files to hf://ann/tuned (private)",
        f"pushed: {hub.url}/ann/tuned",
    ]


def test_a_broken_push_is_given_again(hub: PushHub, export: Path):
    hub.uploads_left = 2
    what = r"^hf://ann/tuned: not pushed: .*; .*/export is complete; give the same command again: "
    with pytest.raises(Failure, match=what) as broken:
        push(export, REPOSITORY, title="first")
    assert broken.value.status == 1
    assert list(hub.repos[NAME].files) == [".gitattributes"]  # no reader sees a part
    hub.uploads_left = None
    push(export, REPOSITORY, title="second")
    assert sorted(hub.uploads) == sorted(LARGE)  # each once
    assert hub.repos[NAME].commits == ["second"]
    assert hub.repos[NAME].files.items() >= FILES.items()


def test_a_pushed_export_is_not_pushed_again(hub: PushHub, export: Path):
    push(export, REPOSITORY, title="first")
    push(export, REPOSITORY, title="second")
    assert hub.repos[NAME].commits == ["first"]


def test_weights_of_an_earlier_export_are_deleted_and_other_files_kept(
    hub: PushHub, export: Path, capsys: pytest.CaptureFixture[str]
):
    push(export, REPOSITORY, title="in three files")
    hub.repos[NAME].files["curves.png"] = b"of the user"
    for file in export.glob("model*"):
        file.unlink()
    (export / "model.safetensors").write_bytes(b"merged")
    capsys.readouterr()
    push(export, Repository(NAME, private=False), title="in one file")
    kept = {name for name in FILES if not name.startswith("model")}
    expected = {".gitattributes", "curves.png", "model.safetensors"} | kept
    assert hub.repos[NAME].files.keys() == expected
    assert hub.repos[NAME].private  # it existed
    shown = capsys.readouterr().out
    assert "deleting files of an earlier export: model-00001-of-00003.safetensors, model-0" in shown
    assert "to hf://ann/tuned (private)" in shown


def test_the_record_of_an_export_is_not_pushed(hub: PushHub, export: Path):
    write_json(export / RECORD, {})
    push(export, Repository("lab/tuned", private=False), title="first")
    assert RECORD not in hub.repos["lab/tuned"].files
    assert not hub.repos["lab/tuned"].private


def log_out(hub: PushHub, monkeypatch: pytest.MonkeyPatch) -> None:
    del hub
    monkeypatch.delenv("HF_TOKEN")


def refuse(hub: PushHub, _: pytest.MonkeyPatch) -> None:
    hub.login = 401


def leave(*_: object) -> None:
    """The hub stays as it is."""


@pytest.mark.parametrize(
    ("handle", "change", "what"),
    [
        ("ann/tuned", leave, "--push ann/tuned: write hf://USER/NAME"),
        ("hf://tuned", leave, "--push hf://tuned: write hf://USER/NAME"),
        ("hf://ann/tuned@main", leave, "--push hf://ann/tuned@main: write hf://USER/NAME"),
        ("hf://ann/a..b", leave, "--push hf://ann/a..b: is not a valid name: "),
        ("hf://bob/tuned", leave, "this login may not write to bob, only to ann, lab; name one"),
        ("hf://ann/tuned", log_out, "there is no login; log in with `hf auth login` or the env"),
        ("hf://ann/tuned", refuse, "the hub refuses this login; log in again with `hf auth login`"),
    ],
)
def test_who_may_not_push_is_told_before_any_work(
    hub: PushHub,
    monkeypatch: pytest.MonkeyPatch,
    handle: str,
    change: Callable[[PushHub, pytest.MonkeyPatch], None],
    what: str,
):
    change(hub, monkeypatch)
    with pytest.raises(ValueError, match=r"^--push ") as refused:
        find_repository(handle, private=True)
    assert what in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert hub.repos == {}


def test_a_user_pushes_to_own_and_organizations_repositories(hub: PushHub):
    assert find_repository("hf://Ann/tuned", private=True) == Repository("ann/tuned", private=True)
    assert find_repository("hf://lab/tuned", private=False).name == "lab/tuned"
    assert hub.repos == {}


def test_a_hub_that_is_gone_fails_the_command(hub: PushHub):
    hub.uploads_left = -1
    with pytest.raises(Failure, match=r"^--push hf://ann/tuned: the hub cannot be reached: ") as no:
        find_repository("hf://ann/tuned", private=True)
    assert no.value.status == 1
