"""Damaged models: each ends the command with status 2 and names all problems."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch import data, doctor, plan, preparation, train
from pipeline.compute.model import weights
from tests.demo_texts import write_tokenizer
from tests.launch.small_run import everything_below, write_request
from tests.pipeline.compute.model import formats

INDEX, SINGLE = formats.INDEX, formats.SINGLE
SHARD = "model-00002-of-00003.safetensors"
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


Command = Callable[[list[str]], int]


def dry_run(words: list[str]) -> int:
    return train.main([*words, "--dry-run"])


def refused(capsys: pytest.CaptureFixture[str], command: Command, *words: str) -> str:
    """The message of a command that ends with a mistake."""
    capsys.readouterr()
    assert command([*words]) == (1 if command is doctor.main else 2)
    printed = capsys.readouterr()
    return printed.out if command is doctor.main else printed.err


def test_the_undamaged_model_is_accepted(request_path: Path):
    assert dry_run([str(request_path)]) == 0


Damage = Callable[[Path], object]


def set_config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def set_tensor(name: str, value: Any) -> Damage:
    """Changes a tensor; None removes it."""
    rest = {} if value is None else {name: value}
    return lambda folder: formats.rewrite(
        folder, lambda tensors: {k: v for k, v in tensors.items() if k != name} | rest
    )


def set_file(name: str, data: bytes | int | None) -> Damage:
    """Replaces the content of a file; a number keeps as many bytes, None removes it."""

    def damage(folder: Path) -> None:
        path = folder / name
        if data is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:data] if isinstance(data, int) else data)

    return damage


def sharded(then: Damage) -> Damage:
    return lambda folder: then(formats.sharded(folder))


def with_ghost(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = SHARD
    (folder / INDEX).write_text(json.dumps(index))


def twice(folder: Path) -> None:
    first, second = (folder / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    shutil.copyfile(first, second)


def as_flax(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    text = weights.read_text_config(folder)
    tree = formats.flax_tree(load_file(folder / SINGLE), text, turned=True)
    change(tree)
    (folder / SINGLE).unlink()
    formats.save_flax(tree, folder / "gemma2")


def without_flax_norm(folder: Path) -> None:
    ghost = {"transformer/layer_9/mlp/linear": {"w": np.zeros((2, 2), np.float32)}}
    as_flax(folder, lambda tree: (tree.pop("transformer/layer_1/pre_ffw_norm"), tree.update(ghost)))


def broken_flax(folder: Path) -> None:
    as_flax(folder, lambda _: None)
    (folder / "gemma2" / "_METADATA").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (set_file(SINGLE, 5_000), [f"{SINGLE} is damaged: "]),
        (set_file(SINGLE, None), [f"lacks {SINGLE}"]),
        (sharded(set_file(SHARD, None)), [f"lacks {SHARD}"]),
        (sharded(set_file(INDEX, b'{"weight_map": {"a": "/etc/a"}}')), ["a is in '/etc/a', not"]),
        (sharded(with_ghost), [f"ghost is not in {SHARD}, which ", f"{INDEX} names"]),
        (sharded(twice), ["is in both", "model-00001-of-00003", " and ", SHARD]),
        (set_tensor(NORM, None), [f"missing: {NORM} (40,)"]),
        (set_tensor(NORM, np.zeros(40, np.int32)), [f"dtype of {NORM}: I32; supported"]),
        (set_tensor("lm_head.weight", np.ones((480, 40), np.float32)), ["lm_head.weight differs"]),
        (set_config(quantization_config={"quant_method": "fp8"}), ["the weights are quantized"]),
        (
            without_flax_norm,
            ["missing: layer_1/pre_ffw_norm/scale (40,)", "surplus: layer_9/mlp"],
        ),
        (broken_flax, ["gemma2 is damaged: "]),
    ],
)
@pytest.mark.parametrize("command", [dry_run, doctor.main])
def test_dry_run_and_doctor_refuse_a_damaged_model(
    request_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Damage,
    what: list[str],
    command: Command,
):
    model = request_path.parent / "model"
    damage(model)
    before = everything_below(request_path.parent)
    message = " ".join(refused(capsys, command, str(request_path)).split())
    assert [words for words in [str(model), *what] if words not in message] == []
    assert everything_below(request_path.parent) == before


@pytest.mark.parametrize(
    ("start", "flags", "what"),
    [
        (None, ["--lora.targets", "x"], "lora.targets = 'x' matches no whole module path"),
        ({"peft_type": "LORA"}, [], "r is None, must be a number above 0"),
        ({"peft_type": "VERA"}, [], "VERA"),
        (
            {"peft_type": "LORA", "r": 2, "lora_alpha": 2},
            ["--lora.rank", "2", "--lora.alpha", "2"],
            "shape of layers.0.self_attn.q_proj: from 3 to 5, in the base from 40 to 32",
        ),
    ],
)
@pytest.mark.parametrize("command", [dry_run, doctor.main])
def test_dry_run_and_doctor_check_the_adapter(
    request_path: Path,
    capsys: pytest.CaptureFixture[str],
    start: dict[str, Any] | None,
    flags: list[str],
    what: str,
    command: Command,
):
    if start is not None:
        folder = request_path.parent / "start"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(start))
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        halves = {"A": np.ones((2, 3), np.float32), "B": np.ones((5, 2), np.float32)}
        tensors = {f"{module}.lora_{half}.weight": value for half, value in halves.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        flags = ["--lora.start", str(folder), *flags]
    assert what in " ".join(refused(capsys, command, str(request_path), *flags).split())


@pytest.mark.parametrize(
    ("damage", "what", "other"),
    [
        (set_config(vocab_size=470), "has 480 pieces, the model's embedding 470 rows", None),
        (set_config(eos_token_id=107), "eos_token_id is 107", None),
        (set_file("tokenizer.model", 500), "tokenizer.model is not a SentencePiece", data),
        (set_file("tokenizer.model", None), "set model.tokenizer if the tokenizer is elsew", data),
        (set_config(num_key_value_heads=3), "num_attention_heads is not a multiple of num_k", plan),
        (
            set_file("chat_template.jinja", b"{{ 1 / 0 }}"),
            "the chat template fails: division",
            data,
        ),
    ],
)
def test_all_commands_say_it_alike(
    request_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Damage,
    what: str,
    other: ModuleType | None,
):
    model = request_path.parent / "model"
    damage(model)
    for command in (dry_run, *([] if other is None else [other.main])):
        message = refused(capsys, command, str(request_path))
        assert str(model) in message
        assert what in message
