"""Dimensions of models from their `config.json`, compared with the models themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from configs.load import load_config
from configs.schema import Lora
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.sharding import make_mesh, placed
from pipeline.data.models.find_shape import PUBLISHED, shape_of, unused_bytes
from pipeline.data.models.hf_config import hf_config_of, read_model_shape
from tests import tiny

CONFIGS = Path(__file__).parents[3] / "slow/configs"
PRESETS = Path(__file__).parents[4] / "configs"
GOLDEN = Path(__file__).parents[3] / "golden"


def hf(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-2-27b", 27_227_128_320),
        ("gemma-3-270m", 268_098_176),
        ("gemma-3-1b", 999_885_952),
        ("gemma-3-4b", 3_880_263_168),
        ("gemma-3-27b", 27_009_346_304),
        ("gemma-4-e2b", 4_628_569_379),
        ("gemma-4-e4b", 7_463_013_418),
    ],
)
def test_parameter_counts_equal_the_published_ones(name, parameters):
    shape = read_model_shape(PUBLISHED[name])
    assert shape.parameters == parameters
    assert shape.base_bytes("bfloat16") == 2 * parameters
    assert read_model_shape(hf_config_of(shape)) == shape


def test_the_adapter_by_hand():
    shape = read_model_shape(hf("gemma3_1b"))
    query, key_value, out = 1152 + 4 * 256, 1152 + 2 * 256, 4 * 256 + 1152
    feed_forward = 3 * (1152 + 6912)
    attention = query + key_value + out
    assert shape.adapter_parameters(Lora(rank=32)) == 26 * 32 * (attention + feed_forward)
    assert shape.adapter_parameters(Lora(rank=8, targets="attention")) == 26 * 8 * attention
    one = Lora(rank=4, targets=r"layers/3/attn/q_einsum")
    assert shape.adapter_parameters(one) == 4 * query


def with_path(path):
    config = load_config(PRESETS / "demo.toml")
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hf://google/gemma-3-270m-it", "gemma3_270m"),
        ("hf://google/gemma-3-1b-pt@main", "gemma3_1b"),
        ("hf://unsloth/gemma-3-1b-it", "gemma3_1b"),
        ("kaggle://google/gemma-3/flax/gemma3-1b-it/1", "gemma3_1b"),
        ("hf://google/gemma-3-4b-it", "gemma3_4b"),
        ("hf://google/gemma-2-2b-it", "gemma2_2b"),
    ],
)
def test_a_hub_handle_is_recognized_by_its_name(path, name, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert shape_of(with_path(path)) == read_model_shape(hf(name))


def test_a_folder_is_read_and_unknown_models_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.hf_config()))
    assert shape_of(with_path(str(tmp_path))).embed == 24
    with pytest.raises(ValueError, match="only Gemma 2, 3 and 4 can be trained"):
        shape_of(with_path("hf://somebody/else"))
    with pytest.raises(ValueError, match="its shape is unknown before the download"):
        shape_of(with_path("hf://somebody/my-gemma"))
    with pytest.raises(FileNotFoundError, match="no folder"):
        shape_of(with_path(str(tmp_path / "none")))


@pytest.mark.parametrize("changes", [{}, tiny.GEMMA2, {"num_key_value_heads": 4}, tiny.GEMMA4])
@pytest.mark.parametrize("quantization", ["none", "int8", "nf4", "int8_matmul"])
def test_bytes_equal_those_of_the_policy(changes, quantization):
    config = tiny.hf_config(**{"num_hidden_layers": 1, **changes})
    shape, mesh = read_model_shape(config), make_mesh(jax.devices()[:1])
    policy = Policy(
        architecture(config, dtype=jnp.dtype("bfloat16")),
        lora=tiny.LORA,
        mesh=mesh,
        quantization=quantization,
    )
    kept = sum(x.size * x.dtype.itemsize for x in policy.base_shapes.values())
    assert shape.base_bytes("bfloat16", quantization=quantization) == kept
    if shape.per_layer_input:
        host = replace(policy, embeddings_in_host=True).base_shapes
        found = shape.base_bytes("bfloat16", quantization=quantization, in_host=True)
        found += shape.host_bytes("bfloat16")
        assert found == sum(x.size * x.dtype.itemsize for x in host.values())
    adapter = sum(x.size for x in policy.adapter_shapes.values())
    assert shape.adapter_parameters(tiny.LORA) == adapter


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1}, tiny.GEMMA4])
@pytest.mark.parametrize(("fsdp", "tp"), [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_base_bytes_of_a_device_equal_its_shard(fsdp, tp, changes):
    config = tiny.hf_config(**changes)
    mesh = make_mesh(jax.devices()[: 2 * fsdp * tp], fsdp=fsdp, tp=tp)
    policy = Policy(architecture(config, dtype=jnp.dtype("bfloat16")), lora=tiny.LORA, mesh=mesh)
    held = 0
    for array in placed(policy.base_shapes, mesh).values():
        assert array.sharding is not None
        part = jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)
        held += part.size * part.dtype.itemsize
    # The per-layer embeddings are sharded over the batch's devices, too.
    assert read_model_shape(config).base_bytes("bfloat16", fsdp=fsdp, tp=tp, data=2) == held


@pytest.mark.parametrize(
    ("name", "published_gb"), [("gemma3_4b", 8.60), ("gemma4_e2b", 10.2), ("gemma4_e4b", 16.0)]
)
def test_unused_bytes_complete_the_published_weights(name, published_gb, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = load_config(PRESETS / f"{name}_gsm8k_v5e8.toml")
    found = 2 * shape_of(config).parameters + unused_bytes(config)
    assert found / 1e9 == pytest.approx(published_gb, rel=5e-3)


@pytest.mark.parametrize("name", ["gemma3", "gemma3_vision", "gemma4", "gemma4_multimodal"])
def test_unused_bytes_of_a_folder_are_those_of_the_other_tensors(name):
    config = with_path(str(GOLDEN / name))
    tensors = load_file(GOLDEN / name / "model.safetensors").values()
    whole = sum(tensor.nbytes for tensor in tensors)
    found = unused_bytes(config)
    assert whole == 4 * shape_of(config).parameters + found
    assert (found > 0) == (name in {"gemma3_vision", "gemma4_multimodal"})
