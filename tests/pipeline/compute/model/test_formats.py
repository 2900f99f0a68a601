"""Every supported format against the golden folder that it was made from."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file
from tunix.models.gemma3 import params as gemma3_params
from tunix.models.gemma4 import model as gemma4
from tunix.models.gemma4 import params as gemma4_params

from pipeline.compute.model import flax_checkpoint, save, weights
from pipeline.compute.model.architecture import Architecture, architecture
from pipeline.compute.model.policy import Params
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import make_policy
from pipeline.data.models.find_shape import PUBLISHED
from pipeline.data.models.hf_config import read_model_shape
from pipeline.data.models.hf_folder import check_folder
from tests.pipeline.compute.model import formats
from tests.tiny import LORA

NEWER = {"language_model.model.": "model.language_model.", "multi_modal": "model.multi_modal"}


@functools.cache
def shapes_of(name: str) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes of a golden folder's parameters."""
    mesh = make_mesh(jax.devices()[:1])
    return make_policy(formats.GOLDEN / name, dtype="float32", lora=LORA, mesh=mesh).plain_shapes


def architecture_of(folder: Path) -> Architecture:
    return architecture(weights.read_text_config(folder), dtype=jnp.dtype("float32"))


def read(folder: Path, name: str) -> Params:
    """A folder's parameters, with the shapes of the golden folder of that name."""
    return dict(weights.stream(folder, shapes_of(name)))


@functools.cache
def golden(name: str) -> Params:
    """A golden folder's parameters."""
    return read(formats.GOLDEN / name, name)


def assert_same(found: Params, expected: Params) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("name", "pieces", "stored"),
    [
        ("gemma3", 1, "bfloat16"),
        ("gemma3_vision", 3, "float32"),
        ("gemma2", 1, "float32"),
        ("gemma4", 3, "bfloat16"),
        ("gemma4_multimodal", 1, "float16"),
    ],
)
def test_folders_of_any_dtype_and_number_of_files_are_read(
    tmp_path: Path, name: str, pieces: int, stored: str
):
    folder = formats.retyped(formats.copy(name, tmp_path), stored)
    if pieces > 1:
        formats.sharded(folder, count=pieces)
    expected = {
        key: jnp.asarray(np.asarray(value).astype(jnp.dtype(stored)).astype(np.float32))
        for key, value in golden(name).items()
    }
    assert_same(read(folder, name), expected)


@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("bfloat16", -np.inf)])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, dtype: str, value: float):
    name = "model.layers.1.self_attn.v_proj.weight"
    folder = formats.retyped(formats.copy("gemma3", tmp_path), dtype)
    tensors = load_file(folder / formats.SINGLE)
    tensors[name][3, 4] = value
    save_file(tensors, folder / formats.SINGLE)
    with pytest.raises(ValueError, match=rf"k_proj\.weight or {name} has NaN or infinite numbers$"):
        read(folder, "gemma3")


def test_both_spellings_of_a_multimodal_folder_are_read_and_its_other_parts_skipped(
    tmp_path: Path,
):
    older = formats.GOLDEN / "gemma3_vision"
    newer = formats.renamed(formats.copy("gemma3_vision", tmp_path / "newer"), NEWER)
    formats.renamed(newer, {"vision_tower.": "model.vision_tower."})
    names = load_file(newer / formats.SINGLE).keys()
    assert {name.split(".")[0] for name in names} == {"model"}
    assert_same(read(newer, "gemma3_vision"), golden("gemma3_vision"))
    for folder in (older, newer):
        said = f"{folder}: only the text model is used; 34 other tensors are skipped"
        assert check_folder(folder) == said
    assert check_folder(formats.GOLDEN / "gemma3") is None


def flax(folder: Path, name: str, *, turned: bool = True, config: bool = True) -> Path:
    """A golden folder in Kaggle's layout: the checkpoint in a separate folder."""
    text = weights.read_text_config(formats.GOLDEN / name)
    tensors = load_file(formats.GOLDEN / name / formats.SINGLE)
    folder.mkdir(parents=True, exist_ok=True)
    formats.save_flax(formats.flax_tree(tensors, text, turned=turned), folder / name)
    if config:
        shutil.copyfile(formats.GOLDEN / name / "config.json", folder / "config.json")
    return folder


@pytest.mark.parametrize(
    ("name", "turned"), [("gemma3", True), ("gemma2", False), ("gemma4", True)]
)
def test_a_flax_checkpoint_gives_the_same_model(tmp_path: Path, name: str, turned: bool):
    folder = flax(tmp_path, name, turned=turned)
    check_folder(folder)
    assert architecture_of(folder) == architecture_of(formats.GOLDEN / name)
    assert_same(read(folder, name), golden(name))


def test_nested_trees_and_vision_tensors_are_supported(tmp_path: Path):
    folder = formats.GOLDEN / "gemma3"
    text = weights.read_text_config(folder)
    flat = formats.flax_tree(load_file(folder / formats.SINGLE), text, turned=True)
    tree: dict[str, Any] = {}
    for path, leaves in flat.items():
        place = tree
        for key in path.split("/")[1:]:
            place = place.setdefault(key, {})
        place.update(leaves)
    tree["embedder"]["mm_input_projection"] = {"w": np.zeros((2, 3), np.float32)}
    tree["vision_encoder"] = {"siglip_encoder": {"pos_embedding": np.zeros(3, np.float32)}}
    tree["AudioEncoder"] = {"encoder": {"w": np.zeros(3, np.float32)}}
    formats.save_flax(tree, tmp_path / "model")
    shutil.copyfile(folder / "config.json", tmp_path / "model" / "config.json")
    check_folder(tmp_path / "model")
    assert_same(read(tmp_path / "model", "gemma3"), golden("gemma3"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_identified_by_the_shapes_of_its_arrays(name: str):
    published = read_model_shape(PUBLISHED[name])
    embed, head_dim, heads = published.embed, published.head_dim, published.heads
    shapes: dict[str, tuple[int, ...]] = {
        "embedder/input_embedding": (published.vocab, embed),
        "layer_0/mlp/linear/w": (published.hidden, embed),
        "layer_0/attn/kv_einsum/w": (2, published.kv_heads, embed, head_dim),
    }
    if published.query_key_norm:
        shapes["layer_0/attn/_query_norm/scale"] = (head_dim,)
    if published.per_layer_input:
        shapes["layer_0/skip_scale"] = (1,)
    for layer in range(published.layers):
        shapes[f"layer_{layer}/attn/q_einsum/w"] = (heads, embed, head_dim)
    assert read_model_shape(flax_checkpoint.config_of(shapes)) == published


def test_a_written_flax_checkpoint_of_gemma_4_is_one_for_tunix(tmp_path: Path):
    expected = golden("gemma4")
    save.save_flax(tmp_path, ((name, np.asarray(value)) for name, value in expected.items()))
    shutil.copyfile(formats.GOLDEN / "gemma4" / "config.json", tmp_path / "config.json")
    assert_same(read(tmp_path, "gemma4"), expected)
    local, whole = gemma4.AttentionType.LOCAL_SLIDING, gemma4.AttentionType.GLOBAL
    config = gemma4.ModelConfig(
        num_layers=10,
        num_embed=96,
        embed_dim=24,
        hidden_dim=32,
        num_heads=4,
        head_dim=8,
        num_kv_heads=1,
        final_logit_softcap=5.0,
        sliding_window_size=8,
        per_layer_input_dim=16,
        global_key_size=16,
        attention_pattern=(*4 * [local], whole),
        frac_shared_layers=0.5,
        override_kv_shared_ffw_hidden=64,
    )
    model = gemma4_params.create_model_from_checkpoint(
        str(tmp_path / save.FLAX), config, dtype=jnp.dtype("float32")
    )
    stored = np.load(formats.GOLDEN / "gemma4" / "golden.npz")
    tokens = jnp.asarray(stored["tokens"])
    causal = jnp.broadcast_to(
        jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool)), (*tokens.shape, tokens.shape[1])
    )
    logits, _ = jax.jit(lambda tokens: model(tokens, attention_mask=causal))(tokens)
    np.testing.assert_allclose(logits, stored["logits"], rtol=0, atol=1e-4)


def test_the_test_trees_are_readable_by_tunix():
    folder = formats.GOLDEN / "gemma3"
    text = weights.read_text_config(folder)
    tree = formats.flax_tree(load_file(folder / formats.SINGLE), text, turned=True)
    mapped = traverse_util.flatten_dict(gemma3_params.map_from_upstream_checkpoint(tree))
    found = {".".join(map(str, path)): jnp.asarray(value) for path, value in mapped.items()}
    assert_same(found, golden("gemma3"))
