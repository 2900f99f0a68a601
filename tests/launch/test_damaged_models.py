"""Damaged models and adapters: each command names them, with the status of a mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch import data, doctor, preparation, train
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


def with_adapter(model: Path) -> None:
    """Writes an adapter for a matrix of another shape."""
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    halves = {"A": np.ones((2, 3), np.float32), "B": np.ones((5, 2), np.float32)}
    tensors = {f"{module}.lora_{half}.weight": value for half, value in halves.items()}
    (model.parent / "start").mkdir()
    save_file(tensors, model.parent / "start" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (model.parent / "start" / "adapter_config.json").write_text(json.dumps(settings))


START = ("--lora.start=start", "--lora.rank=2", "--lora.alpha=2")


@pytest.mark.parametrize(
    ("damage", "flags", "told"),
    [
        (cut_short(SINGLE), (), f"{SINGLE} is damaged: "),
        (lambda model: (model / SINGLE).unlink(), (), f"lacks {SINGLE}"),
        (without_norm, (), f"missing: {NORM} (8,)"),
        (lambda _: None, ("--lora.targets=x",), "'x' matches no whole module path"),
        (
            with_adapter,
            START,
            "q_proj: from 3 to 5, in the base from 8 to 8",
        ),
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


def test_other_commands_say_what_the_dry_run_says(
    request_path: Path, capsys: pytest.CaptureFixture[str]
):
    cut_short("tokenizer.model")(request_path.parent / "model")
    for main, more in ((train.main, ["--dry-run"]), (data.main, [])):
        assert main([str(request_path), *more]) == 2
        assert "tokenizer.model is not a SentencePiece" in capsys.readouterr().err
