"""Run folders and stores for the tests of mirrors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.run.mirror_copier import Copier, scan
from pipeline.run.mirror_store import Manifest, Store, Stored
from pipeline.run.run_folder import RunFolder


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Replaces files as a run does: another inode, the old one is kept by links."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")


def make_run(path: Path, *, steps: int = 1) -> RunFolder:
    """A run folder with a checkpoint of each step."""
    folder = RunFolder(path)
    write(path, {"config.json": "{}", ".lock": "0000000000000.000\n"})
    for step in range(1, steps + 1):
        train(folder, step)
    return folder


def train(folder: RunFolder, step: int) -> None:
    """A step: its rollouts and metrics, a checkpoint in place of the one before the last."""
    write(
        folder.path,
        {
            f"rollouts/step_{step:06d}.jsonl": f"rollouts {step}\n",
            f"checkpoints/{step}/state/data": f"state {step}",
            "checkpoints/best/adapter.safetensors": f"best {step}",
        },
    )
    old = folder.checkpoints / str(step - 2) / "state" / "data"
    old.unlink(missing_ok=True)
    folder.write_metrics({"step": step})
    folder.journal("checkpoint", step=step)
    folder.record_used_s(float(step))


def content(folder: Path) -> dict[str, bytes]:
    """What a mirror has of a run folder."""
    return {path: (folder / path).read_bytes() for path in [*scan(folder), ".lock"]}


def fetched(store: Store, target: Path) -> dict[str, bytes] | None:
    """What another host gets; None if there is nothing."""
    manifest = store.newest()
    if manifest is None:
        return None
    for path, stored in manifest.files.items():
        store.get(path, stored, target / path)
    return content(target)


def make_copier(folder: RunFolder, store: Store, **changes: Any) -> Copier:
    """A copier whose lease is not contested."""
    given: dict[str, Any] = {
        "programs": folder.path / "no-programs",
        "machine": "cpu",
        "guard": lambda: None,
    }
    return Copier(folder.path, store, **{**given, **changes})


class CutError(BaseException):
    """The writer is killed."""


class CutStore(Store):
    """A store whose writer is killed in the middle of an operation; nothing is atomic here.

    Attributes:
        left: operations until then.
    """

    def __init__(self, url: str, *, left: int) -> None:
        super().__init__(url)
        self.left = left

    def _is_cut(self) -> bool:
        self.left -= 1
        return self.left < 0

    def put(self, file: Path, sha256: str) -> None:
        if self._is_cut():
            half = file.read_bytes()[: file.stat().st_size // 2]
            self._fs.pipe_file(self._path("files", sha256), half)
            raise CutError
        super().put(file, sha256)

    def _write(self, path: str, text: bytes) -> None:
        if self._is_cut():
            self._fs.pipe_file(path, text[: len(text) // 2])
            raise CutError
        self._fs.pipe_file(path, text)

    def _delete(self, path: str) -> None:
        if self._is_cut():
            raise CutError
        super()._delete(path)


def damaged(manifest: Manifest, path: str) -> Manifest:
    """A manifest with one path more."""
    files = {**manifest.files, path: Stored(1, "0" * 64)}
    return Manifest(**{**vars(manifest), "files": files})
