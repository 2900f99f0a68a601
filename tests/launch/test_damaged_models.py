"""Damaged models and adapters: each command names them, with the status of a mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from launch import doctor, preparation, train
from tests.launch.small_run import everything_below

SINGLE = "model.safetensors"
NORM = "model.norm.weight"


@pytest.fixture(autouse=True)
def _no_reward_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "check", lambda _: [])


def cut_short(name: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        (model / name).write_bytes((model / name).read_bytes()[:500])

    return damage


def without_norm(model: Path) -> None:
    tensors = load_file(model / SINGLE)
    del tensors[NORM]
    save_file(tensors, model / SINGLE)


@pytest.mark.parametrize(
    ("damage", "flags", "told"),
    [
        (cut_short(SINGLE), (), f"{SINGLE} is damaged: "),
        (lambda model: (model / SINGLE).unlink(), (), f"lacks {SINGLE}"),
        (without_norm, (), f"missing: {NORM} (8,)"),
        (lambda _: None, ("--lora.targets=x",), "'x' matches no whole module path"),
    ],
)
def test_dry_run_and_doctor_name_what_is_damaged(
    request_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    flags: tuple[str, ...],
    told: str,
):
    damage(request_path.parent / "model")
    before = everything_below(request_path.parent)
    for main, more, status in ((train.main, ["--dry-run"], 2), (doctor.main, [], 1)):
        assert main([str(request_path), *flags, *more]) == status
        shown = capsys.readouterr()
        assert told in " ".join((shown.err + shown.out).split())
    assert everything_below(request_path.parent) == before
