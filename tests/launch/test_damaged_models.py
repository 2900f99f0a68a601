"""Damaged models: each ends the command with status 2 and names all problems."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
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


Damage = Callable[[Path], None]


def set_config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def set_tensor(name: str, value: Any) -> Damage:
    """Changes a tensor; None removes it."""

    def damage(folder: Path) -> None:
        def edit(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            rest = {key: kept for key, kept in tensors.items() if key != name}
            return rest if value is None else rest | {name: value}

        formats.rewrite(folder, edit)

    return damage


def truncate(name: str, *, bytes_left: int) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:bytes_left])

    return damage


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def with_bytes(name: str, data: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return damage


def sharded(then: Damage) -> Damage:
    return lambda folder: then(formats.sharded(folder))


def set_index(name: str, file: str | None) -> Damage:
    """Changes the index entry of a tensor; None removes it."""

    def damage(folder: Path) -> None:
        path = folder / INDEX
        index = json.loads(path.read_text())
        index["weight_map"].pop(name, None)
        index["weight_map"] |= {} if file is None else {name: file}
        path.write_text(json.dumps(index))

    return damage


def twice(folder: Path) -> None:
    first, second = (folder / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    shutil.copyfile(first, second)


def as_flax(then: Callable[[dict[str, Any]], None]) -> Damage:
    def damage(folder: Path) -> None:
        text = weights.read_text_config(folder)
        tree = formats.flax_tree(load_file(folder / SINGLE), text, turned=True)
        then(tree)
        (folder / SINGLE).unlink()
        formats.save_flax(tree, folder / "gemma2")

    return damage


def without_flax_norm(tree: dict[str, Any]) -> None:
    del tree["transformer/layer_1/pre_ffw_norm"]
    tree["transformer/layer_9/mlp/linear"] = {"w": np.zeros((2, 2), np.float32)}


def broken_flax(folder: Path) -> None:
    as_flax(lambda _: None)(folder)
    (folder / "gemma2" / "_METADATA").write_text("{}")


SHARD = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (truncate(SINGLE, bytes_left=5_000), [f"{SINGLE} is damaged: "]),
        (without(SINGLE), [f"lacks {SINGLE}"]),
        (sharded(without(SHARD)), [f"lacks {SHARD}"]),
        (
            sharded(with_bytes(INDEX, b'{"weight_map": {"a": "/etc/a"}}')),
            ["a is in '/etc/a', not"],
        ),
        (
            sharded(set_index("ghost", SHARD)),
            [f"ghost is not in {SHARD}, which ", f"{INDEX} names"],
        ),
        (sharded(twice), ["is in both", "model-00001-of-00003", " and ", SHARD]),
        (set_config(vocab_size=470), ["has 480 pieces, the model's embedding 470 rows"]),
        (set_config(eos_token_id=106 + 1), ["eos_token_id is 107", "not <eos> or <end_of_turn>"]),
        (truncate("tokenizer.model", bytes_left=500), ["tokenizer.model is not a SentencePiece"]),
        (without("tokenizer.model"), ["no tokenizer at", "model.tokenizer"]),
    ],
)
def test_a_damaged_model_is_refused(
    request_path: Path, capsys: pytest.CaptureFixture[str], damage: Damage, what: list[str]
):
    model = request_path.parent / "model"
    damage(model)
    before = everything_below(request_path.parent)
    message = refused(capsys, dry_run, str(request_path))
    assert str(model) in message
    for words in what:
        assert words in message
    assert everything_below(request_path.parent) == before


def large(name: str) -> Damage:
    def damage(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(2**30)

    return damage


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (set_tensor(NORM, None), f"missing: {NORM} (40,)"),
        (set_tensor(NORM, np.zeros(40, np.int32)), f"dtype of {NORM}: I32; supported"),
        (set_tensor("lm_head.weight", np.ones((480, 40), np.float32)), "lm_head.weight differs"),
        (set_config(quantization_config={"quant_method": "fp8"}), "the weights are quantized"),
        (as_flax(without_flax_norm), "missing: layer_1/pre_ffw_norm/scale (40,)"),
        (broken_flax, "gemma2 is damaged: "),
    ],
)
@pytest.mark.parametrize("command", [dry_run, doctor.main])
def test_dry_run_and_doctor_refuse_what_the_run_refuses(
    request_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Damage,
    what: str,
    command: Command,
):
    damage(request_path.parent / "model")
    assert what in " ".join(refused(capsys, command, str(request_path)).split())


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
        (
            set_config(num_key_value_heads=3),
            ["config.json", "num_attention_heads is not a multiple of num_key_value_heads"],
            plan,
        ),
        (
            large("config.json"),
            ["config.json has 1,073,741,824 bytes; the maximum is 16,777,216"],
            plan,
        ),
        (
            with_bytes("chat_template.jinja", b"{{ 1 / 0 }}"),
            ["chat_template.jinja: the chat template fails"],
            data,
        ),
    ],
)
def test_all_commands_say_it_in_one_sentence(
    request_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Damage,
    what: list[str],
    other: Any,
):
    model = request_path.parent / "model"
    damage(model)
    for command in (dry_run, other.main):
        (line,) = refused(capsys, command, str(request_path)).splitlines()
        assert [words for words in [str(model), *what] if words not in line] == []
