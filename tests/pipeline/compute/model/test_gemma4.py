"""Per-layer embeddings of a Gemma 4 in host memory; `test_golden` has its logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import make_policy
from tests import tiny
from tests.pipeline.compute.model import formats

SEQ = 3 * tiny.WINDOW + 1
TOKENS = np.random.default_rng(0).integers(8, tiny.VOCAB, (2, SEQ)).astype(np.int32)


TWO_LAYERS: dict[str, Any] = tiny.GEMMA4 | {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
}
slow = partial(pytest.param, marks=pytest.mark.slow)


TABLE = "per_layer_embedder.embedding"


@pytest.mark.parametrize(
    "mesh",
    [slow({}), slow({"devices": 8}), {"devices": 8, "fsdp": 2, "tp": 2}],
    ids=["one device", "eight devices", "sharded weights"],
)
def test_embeddings_in_host_memory_give_the_same_logits(mesh: dict[str, Any]):
    tokens, model = np.tile(TOKENS, (4, 1)), TWO_LAYERS
    chips = tiny.make_policy(**mesh, **model)
    host = tiny.make_policy(**mesh, embeddings_in_host=True, **model)
    base = tiny.make_base(chips)
    there = host.stored_base(base.items())
    assert there[TABLE].sharding.memory_kind == "pinned_host"
    found, wanted = (
        tiny.logits(policy, params, tiny.make_probe(policy), tokens)
        for policy, params in ((host, there), (chips, base))
    )
    np.testing.assert_array_equal(found, wanted)
    for (name, value), (_, exact) in zip(
        host.parameters(there), chips.parameters(base), strict=True
    ):
        np.testing.assert_array_equal(value, exact, err_msg=name)
    again = host.stored_base(there.items())
    assert again[TABLE] is there[TABLE]


def test_a_folder_is_loaded_into_host_memory():
    folder, mesh = formats.GOLDEN / "gemma4", make_mesh(jax.devices()[:2])
    host = make_policy(folder, dtype="float32", lora=tiny.LORA, mesh=mesh, embeddings_in_host=True)
    found = host.load_base(folder)
    shapes, _ = host.abstract_params()
    assert found[TABLE].sharding == shapes[TABLE].sharding
    assert found[TABLE].shape == shapes[TABLE].shape
    stored = load_file(folder / formats.SINGLE)["model.embed_tokens_per_layer.weight"]
    (table,) = (value for name, value in host.parameters(found) if name == TABLE)
    np.testing.assert_array_equal(table, stored)


def test_a_model_without_per_layer_embeddings_cannot_have_them_in_host_memory():
    with pytest.raises(ValueError, match='"host": this model has no per-layer embeddings; nea'):
        tiny.make_policy(num_hidden_layers=1, embeddings_in_host=True)
