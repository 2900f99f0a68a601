"""Hugging Face folders: round trip, several files, damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.compute.model import save, weights
from pipeline.compute.model.policy import Policy
from tests import tiny

LAYERS = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny.policy(layers=2)


def write(folder: Path, policy: Policy, *, dtype: str = "float32", **changes: Any) -> Path:
    """A folder with this policy's parameters and companion files."""
    like, out = folder / "like", folder / "out"
    like.mkdir(parents=True)
    out.mkdir()
    config = tiny.hf_config(**(LAYERS | changes))
    (like / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    (like / "tokenizer.model").write_bytes(b"pieces")
    (like / "old.safetensors").write_bytes(b"old")
    (like / "model.safetensors.index.json").write_text("{}")
    base = tiny.make_base(policy)
    save.save_folder(out, {n: np.asarray(v).astype(dtype) for n, v in base.items()}, like=like)
    return out


def read(folder: Path, policy: Policy) -> dict[str, Any]:
    return dict(weights.stream(folder, policy.abstract_params()[0]))


def change(folder: Path, edit: Any) -> None:
    """Rewrites `model.safetensors` after `edit` has changed its tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(("kv_heads", "dtype"), [(1, "float32"), (2, "bfloat16"), (4, "float32")])
def test_every_parameter_is_restored(tmp_path: Path, kv_heads: int, dtype: str):
    changes: dict[str, Any] = LAYERS | {"num_key_value_heads": kv_heads}
    policy = tiny.make_policy(dtype=dtype, **changes)
    folder = write(tmp_path, policy, dtype=dtype, **changes)
    base, found = tiny.make_base(policy), read(folder, policy)
    assert found.keys() == base.keys()
    for name, value in base.items():
        assert found[name].dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_missing_surplus_and_misshapen_tensors_are_listed(tmp_path: Path, policy: Policy):
    folder = write(tmp_path, policy)

    def edit(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.self_attn.v_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros(1, np.float32)
        tensors["model.embed_tokens.weight"] = np.zeros((5, 24), np.float32)

    change(folder, edit)
    with pytest.raises(ValueError, match="out does not fit its configuration") as raised:
        read(folder, policy)
    assert set(str(raised.value).splitlines()[1:]) == {
        "  missing: model.norm.weight (24,)",
        "  missing: model.layers.1.self_attn.v_proj.weight (16, 24)",
        "  surplus: model.layers.9.mlp.up_proj.weight",
        "  shape of model.embed_tokens.weight: (5, 24), the configuration requires (96, 24)",
    }


@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("bfloat16", -np.inf)])
def test_numbers_that_are_not_finite_are_refused(
    tmp_path: Path, policy: Policy, dtype: str, value: float
):
    folder = write(tmp_path, policy, dtype=dtype)
    read(folder, policy)
    name = "model.layers.1.self_attn.v_proj.weight"

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][3, 4] = value

    change(folder, edit)
    with pytest.raises(ValueError, match=rf"k_proj\.weight or {name} has NaN or infinite numbers$"):
        read(folder, policy)


def test_a_truncated_file_is_an_error(tmp_path: Path, policy: Policy):
    path = write(tmp_path, policy) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: "):
        read(path.parent, policy)
