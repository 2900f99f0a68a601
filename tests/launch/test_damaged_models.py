"""Damaged models: each ends the command with status 2 and names all problems."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch import data, doctor, preparation, train
from pipeline.compute.model import weights
from tests.demo_texts import write_tokenizer
from tests.launch.small_run import everything_below, write_request
from tests.pipeline.compute.model import formats

SINGLE = formats.SINGLE
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid model: Gemma 2, with as many rows as the tokenizer needs."""
    folder = formats.copy("gemma2", tmp_path_factory.mktemp("whole"))
    write_tokenizer(folder)
    rows = np.zeros((480, 40), np.float32)
    formats.rewrite(folder, lambda t: t | {EMBEDDING: rows})
    set_config(vocab_size=480)(folder)
    return folder


@pytest.fixture
def request_path(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A request for a copy of this model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEMMA_GRPO_HOME", raising=False)
    monkeypatch.setattr(preparation, "check", lambda _: [])
    path = write_request(tmp_path, tokenizer=whole)
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(whole, tmp_path / "model")
    return path


def refused(
    capsys: pytest.CaptureFixture[str], request_path: Path, *words: str, flags: Sequence[str] = ()
) -> None:
    """Dry run and doctor end with a mistake, and say all of the words in one message."""
    before = everything_below(request_path.parent)
    for main, more, status in ((train.main, ["--dry-run"], 2), (doctor.main, [], 1)):
        capsys.readouterr()
        assert main([str(request_path), *flags, *more]) == status
        printed = capsys.readouterr()
        message = " ".join((printed.err + printed.out).split())
        assert [word for word in words if word not in message] == [], message
    assert everything_below(request_path.parent) == before


Damage = Callable[[Path], object]


def set_config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def without(name: str) -> Damage:
    """Removes a tensor."""
    return lambda folder: formats.rewrite(
        folder, lambda tensors: {key: value for key, value in tensors.items() if key != name}
    )


def set_file(name: str, data: bytes | int) -> Damage:
    """Replaces the content of a file; a number keeps as many bytes."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:data] if isinstance(data, int) else data)

    return damage


def as_flax(folder: Path) -> None:
    """A flax checkpoint without a tensor."""
    text = weights.read_text_config(folder)
    tree = formats.flax_tree(load_file(folder / SINGLE), text, turned=True)
    del tree["transformer/layer_1/pre_ffw_norm"]
    (folder / SINGLE).unlink()
    formats.save_flax(tree, folder / "gemma2")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (set_file(SINGLE, 5_000), [f"{SINGLE} is damaged: "]),
        (lambda folder: (folder / SINGLE).unlink(), [f"lacks {SINGLE}"]),
        (without(NORM), [f"missing: {NORM} (40,)"]),
        (as_flax, ["missing: layer_1/pre_ffw_norm/scale (40,)"]),
    ],
)
def test_dry_run_and_doctor_refuse_a_damaged_model(
    request_path: Path, capsys: pytest.CaptureFixture[str], damage: Damage, words: list[str]
):
    damage(request_path.parent / "model")
    refused(capsys, request_path, str(request_path.parent / "model"), *words)


def test_dry_run_and_doctor_check_the_adapter(
    request_path: Path, capsys: pytest.CaptureFixture[str]
):
    refused(capsys, request_path, "'x' matches no whole module path", flags=["--lora.targets=x"])
    folder = request_path.parent / "start"
    folder.mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    halves = {"A": np.ones((2, 3), np.float32), "B": np.ones((5, 2), np.float32)}
    tensors = {f"{module}.lora_{half}.weight": value for half, value in halves.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    flags = [f"--lora.start={folder}", "--lora.rank=2", "--lora.alpha=2"]
    for settings, told in (
        ({"peft_type": "VERA"}, "VERA"),
        (
            {"peft_type": "LORA", "r": 2, "lora_alpha": 2},
            "shape of layers.0.self_attn.q_proj: from 3 to 5, in the base from 40 to 32",
        ),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        refused(capsys, request_path, told, flags=flags)


def test_other_commands_say_what_the_dry_run_says(
    request_path: Path, capsys: pytest.CaptureFixture[str]
):
    set_file("tokenizer.model", 500)(request_path.parent / "model")
    for main, more in ((train.main, ["--dry-run"]), (data.main, [])):
        assert main([str(request_path), *more]) == 2
        assert "tokenizer.model is not a SentencePiece" in capsys.readouterr().err
