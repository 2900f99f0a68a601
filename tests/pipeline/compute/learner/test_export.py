"""The export is the trained policy; a failed one never replaces an earlier one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs.model import Format
from pipeline.compute.learner import export as export_module
from pipeline.compute.learner.export import Exporter, merged
from pipeline.compute.learner.learner import Learner
from pipeline.compute.learner.model_card import model_card
from pipeline.compute.model import weights
from pipeline.compute.model.adapter_source import load_adapter
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import make_policy
from pipeline.data.models.hf_folder import check_folder, text_tensors
from pipeline.run.run_folder import RunFolder
from pipeline.types import Completion
from tests import tiny
from tests.pipeline.compute.learner.test_learner import start, usual
from tests.pipeline.compute.model import formats


@pytest.fixture
def learner() -> Learner:
    """A learner with an adapter that changes every output."""
    return start(usual())


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """The folder of the base."""
    folder = tmp_path / "base"
    folder.mkdir()
    config = tiny.hf_config(num_hidden_layers=2)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes(b"pieces")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "LICENSE").write_text("terms")
    (folder / "preprocessor_config.json").write_text("of a vision tower")
    (folder / "old.safetensors").write_bytes(b"old")
    return folder


def exporter(learner: Learner, like: Path, **export: Any) -> Exporter:
    folder = RunFolder(like.parent / "tiny")
    run = {"dir": str(like.parent)}
    return Exporter(
        learner.policy,
        learner.base,
        tiny.make_config(export=export, run=run, model={"path": str(like)}),
        tiny.VOCABULARY,
        like=like,
        tokenizer=like / "tokenizer.model",
        score=learner.score,
        evaluations=lambda: folder.events("evaluated"),
    )


def tuned(learner: Learner) -> dict[str, Any]:
    return {"adapter": learner.state.adapter, "version": learner.state.version}


def examples() -> list[Completion]:
    lengths = [(3, 9), (14, 20), (1, 2)]
    return [r.completion for r in tiny.make_rollouts(lengths, advantages=[0.0] * 3)]


FILES = {
    "LICENSE",
    "README.md",
    "adapter",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.model",
    "tokenizer_config.json",
}


def test_promise_9_the_loaded_export_is_the_policy(tmp_path: Path, learner: Learner, like: Path):
    folder = tmp_path / "run" / "export"
    # An earlier export, and what a process left that died during a replacement.
    for name in ("export", ".export.replaced", "export.tmp"):
        (folder.parent / name).mkdir(parents=True)
        (folder.parent / name / "stale").write_text("old")
    report = exporter(learner, like).export(folder, **tuned(learner), examples=examples())
    assert report.folder == str(folder)
    assert report.tokens == 31
    reloaded = learner.policy.load_base(folder)
    expected = learner.score(examples(), adapter=learner.state.adapter)
    found = learner.score(examples(), adapter=learner.policy.no_adapter(), base=reloaded)
    difference = np.abs(np.concatenate(found) - np.concatenate(expected)).mean()
    assert report.mean_difference == difference <= 1e-4
    plain = learner.score(examples(), adapter=learner.policy.no_adapter())
    assert np.abs(np.concatenate(plain) - np.concatenate(expected)).max() > 0.1
    assert {path.name for path in folder.iterdir()} == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["export"]
    written = json.loads((folder / "generation_config.json").read_text())
    assert set(tiny.VOCABULARY.stops) <= set(written["eos_token_id"])
    found_adapter = load_adapter(str(folder), learner.policy)
    assert found_adapter.what == f"PEFT adapter {folder / 'adapter'}"
    for name, value in learner.state.adapter.items():
        np.testing.assert_array_equal(found_adapter.adapter[name], value)


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.02), ("bfloat16", 0.1)])
def test_the_dtype_of_the_weights_is_configurable(
    tmp_path: Path, learner: Learner, like: Path, dtype: str, bound: float
):
    folder = tmp_path / "export"
    writer = exporter(learner, like, dtype=dtype)
    report = writer.export(folder, **tuned(learner), examples=examples(), formats=("hf",))
    assert report.mean_difference is not None
    assert 1e-5 < report.mean_difference <= bound
    tensors = load_file(folder / "model.safetensors")
    assert {str(value.dtype) for value in tensors.values()} == {dtype}
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == dtype
    assert not (folder / "adapter").exists()


@pytest.mark.parametrize(
    ("formats", "files"), [(("hf",), "*.safetensors"), (("orbax",), "flax/manifest.ocdbt")]
)
def test_a_model_of_several_files_or_for_flax_is_readable(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    learner: Learner,
    like: Path,
    formats: tuple[Format, ...],
    files: str,
):
    folder, shard_bytes = tmp_path / "export", 10_000
    monkeypatch.setattr("pipeline.compute.learner.export.SHARD_BYTES", shard_bytes)
    writer = exporter(learner, like)
    report = writer.export(folder, **tuned(learner), examples=examples(), formats=formats)
    assert report.mean_difference is not None
    assert report.mean_difference <= 1e-4
    sizes = [file.stat().st_size for file in folder.glob(files)]
    assert len(sizes) > 3 if formats == ("hf",) else len(sizes) == 1
    assert max(sizes) < 1.15 * shard_bytes
    reloaded = learner.policy.load_base(folder)
    for name, value in merged(learner.policy, learner.base, learner.state.adapter, dtype="float32"):
        np.testing.assert_array_equal(reloaded[name], value)


PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


@pytest.mark.slow
@pytest.mark.parametrize("in_host", [False, True], ids=["on chips", "in host memory"])
def test_the_export_of_a_multimodal_folder_has_its_other_parts_unchanged(
    tmp_path: Path, in_host: bool
):
    like = formats.with_unused(formats.copy("gemma4_multimodal", tmp_path / "base"))
    for name in (*PROCESSOR, "tokenizer.model"):
        (like / name).write_text(name)
    mesh = make_mesh(jax.devices()[:1])
    policy = make_policy(
        like, dtype="float32", lora=tiny.LORA, mesh=mesh, embeddings_in_host=in_host
    )
    base = policy.load_base(like)
    config = tiny.make_config(model={"path": str(like)}, export={"dtype": "bfloat16"})
    pieces = like / "tokenizer.model"
    writer = Exporter(policy, base, config, tiny.VOCABULARY, like=like, tokenizer=pieces)
    adapter = tiny.make_probe(policy)
    folder = tmp_path / "export"
    report = writer.export(folder, adapter, version=1, examples=examples())
    assert (report.mean_difference is None) == in_host  # parameters are compared instead
    assert {path.name for path in folder.iterdir()} == {
        *(FILES - {"LICENSE", "tokenizer_config.json"}),
        *PROCESSOR,
    }
    for name in PROCESSOR:
        assert (folder / name).read_text() == name
    theirs, ours = (load_file(place / "model.safetensors") for place in (like, folder))
    assert ours.keys() == theirs.keys()
    text = {tensor.name for tensor in text_tensors(like)[0].values()}
    for name, value in theirs.items():
        assert str(ours[name].dtype) == ("bfloat16" if name in text else "float32")
        if name not in text:
            np.testing.assert_array_equal(ours[name], value)
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert (ours[name].astype(np.float32) != theirs[name]).mean() > 0.5
    was, now = (json.loads((place / "config.json").read_text()) for place in (like, folder))
    assert now["text_config"].pop("dtype") == now["dtype"] == "bfloat16"
    del was["text_config"]["dtype"], now["text_config"]["torch_dtype"], now["torch_dtype"]
    assert now == was | {"dtype": "bfloat16"}
    told = check_folder(like)
    assert told is not None
    assert check_folder(folder) == told.replace(str(like), str(folder))


def test_promise_9_a_failed_verification_leaves_the_old_export(
    tmp_path: Path, learner: Learner, like: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"the one before")

    def wrong(*args: Any, **settings: Any) -> Iterator[tuple[str, np.ndarray]]:
        for name, value in merged(*args, **settings):
            spoiled = name == "layers.1.mlp.down_proj.kernel"
            yield name, value + np.float32(0.01) if spoiled else value

    monkeypatch.setattr(export_module, "merged", wrong)
    with pytest.raises(RuntimeError, match=r"scores tokens differently from the policy: .*, allow"):
        exporter(learner, like).export(folder, **tuned(learner), examples=examples())
    assert (folder / "model.safetensors").read_bytes() == b"the one before"


def test_without_memory_for_a_second_model_parameters_are_compared(
    tmp_path: Path, learner: Learner, like: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_room(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(Policy, "load_base", no_room)
    writer, folder = exporter(learner, like), tmp_path / "export"
    report = writer.export(folder, **tuned(learner), examples=examples())
    assert (report.mean_difference, report.tokens) == (None, 0)
    before = (folder / "model.safetensors").read_bytes()
    kept = weights.stream

    def damaged(*args: Any, **settings: Any) -> Iterator[tuple[str, jax.Array]]:
        for name, value in kept(*args, **settings):
            yield name, value + 1e-3 if name == "layers.1.mlp.down_proj.kernel" else value

    monkeypatch.setattr(weights, "stream", damaged)
    with pytest.raises(RuntimeError, match=r"does not hold the policy's layers\.1\.mlp\.down_proj"):
        writer.export(folder, **tuned(learner), examples=examples())
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_quantized_base_is_exported_dequantized(tmp_path: Path, like: Path):
    policy = tiny.make_policy(num_hidden_layers=2, quantization="nf4")
    plain = tiny.base(layers=2)
    base = policy.stored_base(plain.items())
    config = tiny.make_config(model={"path": str(like), "quantization": "nf4"})
    pieces = like / "tokenizer.model"
    writer = Exporter(policy, base, config, tiny.VOCABULARY, like=like, tokenizer=pieces)
    adapter = tiny.probe(layers=2)
    report = writer.export(tmp_path / "export", adapter, version=1, examples=examples())
    assert report.mean_difference is not None
    assert report.mean_difference <= 1e-4
    # The export has the quantized base's values, not the original ones.
    written = load_file(tmp_path / "export" / "model.safetensors")
    norm, matrix = "final_norm.scale", "layers.0.attn.q_einsum.w"
    np.testing.assert_array_equal(written["model.norm.weight"], plain[norm])
    exact = dict(merged(tiny.policy(layers=2), plain, adapter, dtype="float32"))[matrix]
    stored = written["model.layers.0.self_attn.q_proj.weight"]
    stored = stored.reshape(4, 8, 24).transpose(0, 2, 1)
    assert float(jnp.abs(stored - exact).max()) > 1e-4


def test_the_model_card_has_the_measured_accuracy(tmp_path: Path, learner: Learner, like: Path):
    run = RunFolder(tmp_path / "tiny")
    run.path.mkdir()
    # The first measurement was repeated later.
    measured = [("test_before", 0, 0.125), ("test_before", 0, 0.25), ("validation", 3, 0.5)]
    for name, step, accuracy in measured:
        ci95 = [0.125, 0.875]
        run.journal("evaluated", name=name, step=step, accuracy=accuracy, n=8, ci95=ci95)
    writer, adapter = exporter(learner, like), learner.state.adapter
    writer.export(tmp_path / "export", adapter, version=7, examples=examples())
    card = (tmp_path / "export" / "README.md").read_text()
    assert "trained with GRPO for 7 steps" in card
    assert "| test_before | 0 | 25.0% [12.5%, 87.5%] | 8 |" in card
    assert "| validation |" not in card
    assert str(tmp_path) not in card
    assert json.loads(card.split("```json\n")[1].split("```")[0])["learner"]["lr"] == 1e-2


LOCAL: dict[str, dict[str, Any]] = {
    "run": {"dir": "/home/me/runs"},
    "model": {"path": "/home/me/models/gemma"},
    "lora": {"start": "/home/me/adapters/first"},
    "data": {"train": {"path": "/home/me/data/train.jsonl"}},
    "rewards": {"functions": [{"name": "style", "function": "/home/me/my_rewards.py:style"}]},
    "learner": {"teacher": "/home/me/adapters/teacher", "distill_coef": 0.5},
}
ON_THE_HUB: dict[str, dict[str, Any]] = {
    "model": {"path": "hf://google/gemma-3-1b-it@main"},
    "rollout": {"stop_strings": ("</answer>", "\n\n")},
    "prompt": {"answer_prefix": "<reasoning>\n"},
}


@pytest.mark.parametrize(
    ("tables", "facts", "shown"),
    [
        (LOCAL, {}, ("`gemma`, trained", '"teacher"', "`train.jsonl`", '"my_rewards.py:style"')),
        (
            ON_THE_HUB,
            {"kind": "gemma4_text", "multimodal": True},
            (
                '\nlicense: "apache-2.0"\n',
                '\nbase_model: "google/gemma-3-1b-it"\n',
                "a multimodal model, of which only the text model is trained",
                '| prefix of the model\'s turn | `"<reasoning>\\n"` |',
                '| stop strings | `"</answer>"`, `"\\n\\n"` |',
            ),
        ),
        ({}, {"step": 0}, ("**This is the untrained model.** The export was written before",)),
    ],
    ids=["local files without their folders", "base on the hub", "untrained"],
)
def test_the_model_card_says(tables: Any, facts: dict[str, Any], shown: tuple[str, ...]):
    usual = {"step": 1, "formats": ("hf",), "kind": "gemma3_text", "multimodal": False}
    card = model_card(tiny.make_config(**tables), dtype="bfloat16", **{**usual, **facts})
    assert [text for text in shown if text not in card] == []
    assert "/home" not in card
    assert ("This is the untrained model" in card) == (facts.get("step") == 0)
