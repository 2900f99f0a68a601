"""Gemma 4 against Tunix's."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tunix.models.gemma4 import model as gemma4

from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import make_policy
from tests import tiny
from tests.pipeline.compute.model import formats

SLIDING, FULL = "sliding_attention", "full_attention"
SEQ = 3 * tiny.WINDOW + 1
TOKENS = np.random.default_rng(0).integers(8, tiny.VOCAB, (2, SEQ)).astype(np.int32)


def tunix_config(policy: Policy) -> gemma4.ModelConfig:
    shape = policy.architecture.shape
    kinds = {True: gemma4.AttentionType.LOCAL_SLIDING, False: gemma4.AttentionType.GLOBAL}
    return gemma4.ModelConfig(
        num_layers=shape.layers,
        num_embed=shape.vocab,
        embed_dim=shape.embed,
        hidden_dim=shape.hidden,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        num_kv_heads=shape.kv_heads,
        final_logit_softcap=shape.final_softcap,
        sliding_window_size=shape.window,
        per_layer_input_dim=shape.per_layer_input,
        global_key_size=shape.global_head_dim,
        attention_pattern=tuple(kinds[local] for local in shape.local),
        frac_shared_layers=shape.kv_shared_layers / shape.layers,
        override_kv_shared_ffw_hidden=shape.shared_hidden,
    )


def to_tunix(policy: Policy, base: Params) -> dict[str, Any]:
    """Parameters of Tunix's model; zeros for those that a layer with shared ones never reads."""
    shape = policy.architecture.shape
    outside = {
        "embedder.input_embedding": base["embedder.input_embedding"],
        "final_norm.scale": base["final_norm.scale"],
    }
    if shape.per_layer_input:
        sizes = (-1, shape.layers, shape.per_layer_input)
        at = "per_layer_embedder"
        outside |= {
            "embedder.per_layer_input_embedding": base[f"{at}.embedding"].reshape(sizes),
            "embedder.per_layer_model_projection.w": base[f"{at}.projection.kernel"].reshape(sizes),
            "embedder.per_layer_projection_norm.scale": base[f"{at}.norm.scale"],
        }
    renamed = {
        "output.scale": "skip_scale",
        "per_layer.input_gate.kernel": "per_layer_input_gate.w",
        "per_layer.projection.kernel": "per_layer_projection.w",
        "per_layer.norm.scale": "post_per_layer_input_norm.scale",
    }
    found = dict(outside)
    for name, value in base.items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            found[f"layers.{number}.{renamed.get(rest, rest)}"] = value
    return found


def logits_of_tunix(policy: Policy, base: Params, tokens: np.ndarray = TOKENS) -> jax.Array:
    """Logits of whole rows; can be traced."""
    model = nnx.eval_shape(lambda: gemma4.Gemma4(tunix_config(policy), rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    given, unread = to_tunix(policy, base), []
    flat = []
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        if name not in given:
            unread.append(name)
        value = given.pop(name, jnp.zeros(variable.shape))
        assert value.shape == variable.shape, name
        flat.append((path, variable.replace(value)))
    assert not given
    assert all("kv_einsum" in name or "_key_norm" in name for name in unread)
    rows, seq = tokens.shape
    causal = jnp.tril(jnp.ones((seq, seq), bool))[None].repeat(rows, 0)
    positions = jnp.broadcast_to(jnp.arange(seq), tokens.shape)
    run = nnx.merge(graphdef, nnx.from_flat_state(flat))
    logits: jax.Array = run(jnp.asarray(tokens), positions, None, causal)[0]
    return logits


def pattern(local: int, *, shared: int) -> dict[str, Any]:
    kinds = 2 * [*local * [SLIDING], FULL]
    layers = {"num_hidden_layers": len(kinds), "layer_types": kinds}
    return tiny.GEMMA4 | layers | {"num_kv_shared_layers": shared}


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "changes",
    [
        pattern(2, shared=3) | {"num_key_value_heads": 1},
        slow(pattern(5, shared=6) | {"use_double_wide_mlp": False}),
        slow(tiny.GEMMA4 | {"num_kv_shared_layers": 0, "global_head_dim": 8}),
        slow(tiny.GEMMA4 | {"hidden_size_per_layer_input": 0}),
    ],
    ids=["as E2B", "E4B", "nothing shared", "no per-layer inputs"],
)
def test_logits_equal_those_of_tunix(changes: dict[str, Any]):
    policy = tiny.make_policy(**changes)
    base = tiny.make_base(policy)
    ours = tiny.logits(policy, base, policy.no_adapter(), TOKENS)
    assert float(jnp.abs(ours).max()) > 1  # the soft cap matters
    theirs = jax.jit(partial(logits_of_tunix, policy))(base)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


TABLE = "per_layer_embedder.embedding"


@pytest.mark.parametrize(
    "mesh",
    [slow({}), slow({"devices": 8}), {"devices": 8, "fsdp": 2, "tp": 2}],
    ids=["one device", "eight devices", "sharded weights"],
)
def test_embeddings_in_host_memory_give_the_same_logits(mesh: dict[str, Any]):
    tokens, model = np.tile(TOKENS, (4, 1)), pattern(0, shared=1)
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
