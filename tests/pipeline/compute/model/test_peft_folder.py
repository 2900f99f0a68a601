"""PEFT folders: read with PEFT's semantics, written in PEFT's format."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from configs.schema import Lora
from pipeline.compute.model import lora as lora_lib
from pipeline.compute.model.adapter_source import load_adapter, needs_separate
from pipeline.compute.model.peft_folder import MULTIMODAL, TEXT, write_peft
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.projections import to_pairs
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import open_policy
from tests import tiny

GOLDEN = Path(__file__).parents[3] / "golden"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def settings(name: str, **changes: Any) -> Lora:
    """The settings of a golden adapter."""
    found: dict[str, dict[str, Any]] = {
        "peft_gemma3": {"rank": 3, "alpha": 6.0},
        "peft_gemma2": {
            "rank": 2,
            "alpha": 8.0,
            "scaling": "rslora",
            "targets": r"layers/\d+/attn/(q|kv)_einsum",
        },
        "peft_gemma3_vision": {"rank": 2, "alpha": 2.0, "targets": "attention"},
        "peft_gemma4_multimodal": {"rank": 2, "alpha": 6.0, "targets": "all"},
    }
    return Lora(**(found[name] | {"start": str(GOLDEN / name)} | changes))


def opened(name: str, lora: Lora) -> tuple[Policy, Params]:
    mesh = make_mesh(jax.devices()[:1])
    folder = GOLDEN / name.removeprefix("peft_")
    return open_policy(folder, dtype="float32", lora=lora, mesh=mesh)


@pytest.mark.parametrize(
    "name",
    [
        "peft_gemma3",
        pytest.param("peft_gemma2", marks=pytest.mark.slow),
        pytest.param("peft_gemma3_vision", marks=pytest.mark.slow),
        "peft_gemma4_multimodal",
    ],
)
def test_logits_equal_those_of_peft(name: str):
    stored = np.load(GOLDEN / name / "golden.npz")
    policy, base = opened(name, settings(name))
    adapter = load_adapter(str(GOLDEN / name), policy)
    found = tiny.logits(policy, base, adapter.adapter, stored["tokens"])
    np.testing.assert_allclose(found, stored["logits"], rtol=0, atol=1e-4)
    plain = np.load(GOLDEN / name.removeprefix("peft_") / "golden.npz")["logits"]
    assert np.abs(plain - stored["logits"]).max() > 0.1
    assert adapter.version == 0


def described(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    with safe_open(folder / TENSORS, framework="numpy") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {key: (tuple(s.get_shape()), s.get_dtype()) for key, s in slices.items()}


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("peft_gemma3", TEXT),
        ("peft_gemma3_vision", MULTIMODAL),
        ("peft_gemma4_multimodal", MULTIMODAL),
    ],
)
def test_a_written_folder_has_pefts_format(tmp_path: Path, name: str, layers: str):
    lora = settings(name, start=None)
    policy = opened(name, lora)[0]
    adapter = jax.device_get(policy.probe_adapter(0))
    base = name.removeprefix("peft_")
    write_peft(tmp_path, to_pairs(adapter), lora=lora, base=base, revision=None, layers=layers)
    assert described(tmp_path) == described(GOLDEN / name)
    theirs = json.loads((GOLDEN / name / CONFIG).read_text())
    ours = json.loads((tmp_path / CONFIG).read_text())
    targets, wanted = ours.pop("target_modules"), theirs.pop("target_modules")
    assert ours == {key: theirs[key] for key in ours}
    modules = {
        key.removeprefix("base_model.model.").split(".lora_")[0] for key in described(tmp_path)
    }
    if isinstance(wanted, list):
        assert set(targets) == set(wanted)
    else:
        # Full names: a vision tower has projections with the same last names.
        assert set(targets) == modules
        assert all(re.fullmatch(wanted, module) for module in modules)


def test_an_adapter_on_some_layers_has_full_module_names(tmp_path: Path):
    lora = tiny.LORA.model_copy(update={"targets": r"layers/1/attn/kv_einsum"})
    policy = tiny.make_policy(lora=lora, num_hidden_layers=2)
    pairs = to_pairs(jax.device_get(policy.probe_adapter(0)))
    write_peft(tmp_path, pairs, lora=lora, base="b", revision="main", layers=TEXT)
    config = json.loads((tmp_path / CONFIG).read_text())
    names = ["model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"]
    assert (config["target_modules"], config["revision"]) == (names, "main")


def test_the_separate_lora_a_of_a_fused_matrix_are_written_and_read_again(
    tmp_path: Path, golden_policy: Policy
):
    """Each projection of the matrix has the sum of the ranks, which the configuration records."""
    started = settings("peft_gemma3")
    assert needs_separate(started)
    loaded = load_adapter(str(GOLDEN / "peft_gemma3"), golden_policy).adapter
    assert loaded["layers.1.attn.kv_einsum.w_lora_a"].shape == (40, 6)
    write_peft(tmp_path, to_pairs(loaded), lora=started, base="b", revision=None, layers=TEXT)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["rank_pattern"] == {"k_proj": 6, "v_proj": 6}
    assert config["alpha_pattern"] == {"k_proj": 12.0, "v_proj": 12.0}
    reread = load_adapter(str(tmp_path), golden_policy).adapter
    assert lora_lib.sha256(reread) == lora_lib.sha256(loaded)


def truncate(folder: Path) -> None:
    data = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(data[: len(data) // 2])


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / TENSORS)
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    save_file(tensors, folder / TENSORS)


def use_dora(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"use_dora": True}))


@pytest.mark.parametrize(
    ("edit", "changes", "message"),
    [
        (truncate, {}, rf"{TENSORS} is damaged: "),
        (use_dora, {}, "use_dora is True, must be False"),
        (lose_a_tensor, {}, r"missing: lora_A of layers\.0\.self_attn\.q_proj"),
        (None, {"rank": 4, "alpha": 8.0}, r"rank of layers\.0\..*: 3, lora\.rank is 4"),
        (None, {"scaling": "rslora"}, r"make 3\.46.*nearest valid: lora\.alpha = 3\.4641"),
        (
            None,
            {"targets": "attention"},
            r"surplus: layers\.0\.mlp\.down_proj, which lora\.targets",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_an_error(
    tmp_path: Path,
    golden_policy: Policy,
    edit: Callable[[Path], None] | None,
    changes: dict[str, Any],
    message: str,
):
    folder = tmp_path / "adapter"
    shutil.copytree(GOLDEN / "peft_gemma3", folder)
    if edit is not None:
        edit(folder)
    lora = settings("peft_gemma3", **changes)
    policy = dataclasses.replace(golden_policy, lora=lora)
    with pytest.raises(ValueError, match=r"(?s)^lora\.start: .*" + message):
        load_adapter(str(folder), policy)


@pytest.fixture(scope="module")
def golden_policy() -> Policy:
    return opened("peft_gemma3", settings("peft_gemma3"))[0]
