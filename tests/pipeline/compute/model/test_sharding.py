"""Weights on meshes of data x fsdp x tp: shards, and results independent of the mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute.model import lookup, weights
from pipeline.compute.model.sharding import (
    batch_shards,
    by_row,
    make_mesh,
    parameter_sharding,
    placed,
)
from pipeline.compute.opening import make_policy
from tests import tiny

GOLDEN = Path(__file__).parents[3] / "golden" / "gemma3"
ONE: dict[str, Any] = {"num_hidden_layers": 1}
MESH: dict[str, Any] = {"devices": 8, "fsdp": 2, "tp": 2}
MANY = ONE | MESH


RNG = np.random.default_rng(0)
TOKENS = RNG.integers(8, tiny.VOCAB, (8, 20)).astype(np.int32)


def test_a_mesh_has_three_axes_and_data_has_the_remaining_devices():
    devices = jax.devices()
    mesh = make_mesh(devices, fsdp=2, tp=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tp": 2}
    assert list(mesh.devices.flat) == devices
    assert batch_shards(mesh) == 4
    with pytest.raises(ValueError, match=r"= 3 x 1 must divide the number of devices, which is 8"):
        make_mesh(devices, fsdp=3)


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        ("embedder.input_embedding", (96, 24), (24, 24)),
        ("layers.0.attn.q_einsum.w", (4, 24, 8), (2, 12, 8)),
        ("layers.3.attn.kv_einsum.w", (2, 2, 24, 8), (2, 1, 12, 8)),
        ("layers.3.attn.kv_einsum.w", (2, 1, 24, 8), (2, 1, 12, 8)),
        ("layers.0.attn.qkv_einsum.w", (3, 4, 24, 8), (3, 2, 12, 8)),
        ("layers.0.attn.attn_vec_einsum.w", (4, 8, 24), (2, 8, 12)),
        ("layers.0.attn.attn_vec_einsum.w", (4, 8, 25), (2, 8, 25)),
        ("layers.11.mlp.gate_proj.kernel", (24, 40), (12, 20)),
        ("layers.11.mlp.down_proj.kernel", (40, 24), (20, 12)),
        ("layers.11.mlp.down_proj.kernel.array.qvalue", (40, 12), (20, 6)),
        ("layers.11.mlp.down_proj.kernel.array.scale", (1, 24), (1, 12)),
        ("layers.0.attn._query_norm.scale", (8,), (8,)),
        ("final_norm.scale", (24,), (24,)),
    ],
)
def test_the_shape_of_a_shard(name: str, shape: tuple[int, ...], part: tuple[int, ...]):
    mesh = make_mesh(jax.devices(), fsdp=2, tp=2)
    assert parameter_sharding(name, shape, mesh).shard_shape(shape) == part


def test_a_vocabulary_that_the_mesh_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match=r"= 2 x 2 .* must divide the vocabulary of 98 entries"):
        tiny.make_policy(devices=4, fsdp=2, tp=2, vocab_size=98, num_hidden_layers=1)


@pytest.mark.parametrize(("fsdp", "tp"), [(4, 2), (1, 1)])
@pytest.mark.parametrize("at_a_time", [7, 2048])
def test_the_embedding_lookup_is_exact(
    fsdp: int, tp: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lookup, "_POSITIONS", at_a_time)
    mesh = make_mesh(jax.devices(), fsdp=fsdp, tp=tp)
    table = RNG.standard_normal((96, 24)).astype(jnp.bfloat16)
    place = parameter_sharding("embedder.input_embedding", table.shape, mesh)
    given = jax.device_put((TOKENS, table), (by_row(mesh), place))
    found = jax.jit(lambda *given: lookup.look_up(*given, mesh=mesh))(*given)
    np.testing.assert_array_equal(found, table[TOKENS])
    assert found.sharding.is_equivalent_to(by_row(mesh), found.ndim)


def test_a_sharded_quantized_base_has_the_same_codes_and_values():
    kept = []
    for shape in (ONE, MANY):
        policy = tiny.make_policy(**shape, quantization="nf4")
        base = policy.stored_base(tiny.make_base(tiny.make_policy(**shape)).items())
        kept.append((policy, base))
    (one, base), (many, parts) = kept
    assert parts.keys() == base.keys()
    places, _ = many.abstract_params()
    for name, value in parts.items():
        np.testing.assert_array_equal(value, base[name])
        assert value.sharding.is_equivalent_to(places[name].sharding, value.ndim)
    codes = parts["layers.0.mlp.gate_proj.kernel.array.qvalue"]
    assert codes.addressable_shards[0].data.size == codes.size // 4
    wanted = dict(one.parameters(base))
    for name, value in many.parameters(parts):
        np.testing.assert_array_equal(value, wanted[name])


def test_a_folder_is_loaded_sharded():
    mesh = make_mesh(jax.devices(), fsdp=2, tp=2)
    shapes = make_policy(GOLDEN, dtype="float32", lora=tiny.LORA, mesh=mesh).plain_shapes
    places, one = placed(shapes, mesh), dict(weights.stream(GOLDEN, shapes))
    held = dict.fromkeys(jax.devices(), 0)
    for name, value in weights.stream(GOLDEN, places):
        np.testing.assert_array_equal(value, one[name])
        assert value.sharding == places[name].sharding
        for shard in value.addressable_shards:
            held[shard.device] += shard.data.nbytes
    whole = sum(value.nbytes for value in one.values())
    # One kv head and the norms are not sharded over tp.
    assert len(set(held.values())) == 1
    assert 0.25 * whole < held[jax.devices()[0]] < 0.3 * whole


def test_per_layer_embeddings_in_host_memory_give_the_same_logits():
    model: dict[str, Any] = tiny.GEMMA4 | {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        **MESH,
    }
    table = "per_layer_embedder.embedding"
    chips = tiny.make_policy(**model)
    host = tiny.make_policy(embeddings_in_host=True, **model)
    base = tiny.make_base(chips)
    there = host.stored_base(base.items())
    assert there[table].sharding.memory_kind == "pinned_host"
    found, wanted = (
        tiny.logits(policy, params, tiny.make_probe(policy), TOKENS)
        for policy, params in ((host, there), (chips, base))
    )
    np.testing.assert_array_equal(found, wanted)
    for (name, value), (_, exact) in zip(
        host.parameters(there), chips.parameters(base), strict=True
    ):
        np.testing.assert_array_equal(value, exact, err_msg=name)
    again = host.stored_base(there.items())
    assert again[table] is there[table]
