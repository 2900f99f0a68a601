"""`launch.bench mesh`: the layer split computes what one device computes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.bench.layer_split import LayerSplit
from launch.bench.mesh import device_bytes
from launch.bench.shapes import SMALL, one_device, random_model
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.attention import Layout, PackedAttention
from pipeline.compute.model.head import Head
from pipeline.compute.model.sharding import make_mesh
from pipeline.data.models.find_shape import PUBLISHED
from pipeline.data.models.hf_config import read_model_shape, text_config

# Local, local, global: neither two nor four stages divide them.
MODEL = SMALL | {"num_hidden_layers": 3, "sliding_window_pattern": 3}
ARCHITECTURE = architecture(MODEL, dtype=jnp.dtype("float32"))
ROWS, LENGTH = 4, 12
CONFIG = one_device("demo", slots=8, prompt=8, new=8)


def forward(policy, base, adapter, tokens):
    """The logits, from the rows' hidden states."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = PackedAttention(Layout(positions, jnp.ones_like(positions)))
    hidden, _ = policy.bind(base, adapter, exact=True)(tokens, positions, attend=attend)
    return jnp.einsum("btd,vd->btv", hidden, policy.embedding(base))


def outcome(policy, base, adapter, tokens):
    """The logits, and the gradient of the adapter through all of them."""

    def loss(adapter):
        logits = forward(policy, base, adapter, tokens)
        return jax.nn.logsumexp(logits, axis=-1).mean(), logits

    gradient, logits = policy.jit(jax.grad(loss, has_aux=True))(adapter)
    return logits, gradient


@pytest.fixture(scope="module")
def single():
    """Policy, base, adapter and tokens on one device, and their outcome."""
    rng = np.random.default_rng(0)
    # With a larger embedding every token repeats.
    policy, base, adapter = random_model(MODEL, CONFIG, embedding=0.02)
    tokens = rng.integers(2, MODEL["vocab_size"], (ROWS, LENGTH)).astype(np.int32)
    return policy, base, adapter, tokens, *outcome(policy, base, adapter, tokens)


def split_of(base, adapter, *, stages, micro_batches):
    """The layer split, and its parameters on the stages."""
    mesh = make_mesh(jax.devices()[:stages], tp=stages)
    split = LayerSplit(ARCHITECTURE, lora=CONFIG.lora, mesh=mesh, micro_batches=micro_batches)
    params = [jax.tree.map(np.asarray, split.stack(some)) for some in (base, adapter)]
    places = jax.tree.map(lambda x: x.sharding, list(split.abstract_params()))
    return split, *jax.device_put(params, places)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 4), (4, 1), (4, 2)])
def test_layer_split_equals_one_device(single, stages, micro_batches):
    _, base, adapter, tokens, logits, gradient = single
    split, base, adapter = split_of(base, adapter, stages=stages, micro_batches=micro_batches)
    found, changes = outcome(split, base, adapter, tokens)
    expected = {"logits": logits} | split.stack(gradient)
    for name, value in ({"logits": found} | changes).items():
        bound = 1e-5 * float(jnp.abs(expected[name]).max())
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_layer_split_decodes_the_most_likely_tokens(single, micro_batches):
    policy, base, adapter, tokens, *_ = single
    split, *params = split_of(base, adapter, stages=2, micro_batches=micro_batches)
    steps, shape = LENGTH - 1, ARCHITECTURE.shape
    ring = jnp.zeros((split.stages, ROWS, shape.kv_heads, LENGTH, shape.head_dim))
    decode = partial(split.decode, head=Head(None, 1.0, 64, 512, split.mesh), steps=steps)
    found = split.jit(decode)(
        *params, tokens[:, 0], jnp.zeros(ROWS, jnp.int32), split.depth * [(ring, ring)]
    )
    read = np.concatenate([tokens[:, :1], found], axis=1)
    logits = policy.jit(partial(forward, policy))(base, adapter, read)
    np.testing.assert_array_equal(found, logits[:, :-1].argmax(axis=-1))
    assert (np.diff(read) != 0).any()


def test_bytes_of_a_device_by_layout():
    shape = read_model_shape(text_config(PUBLISHED["gemma-3-1b"]))
    layer = 2 * (2 * 1152 * 4 * 256 + 2 * 1152 * 256 + 3 * 1152 * 6912)
    embedding, cache = 2 * 262_144 * 1152, 2 * 2 * 256 * 32 * 512
    norms = 0.001 * layer
    # A stage has four of 26 layers, and the caches of all slots in them.
    split = 4 * (layer + 8 * cache) + embedding / 8
    assert device_bytes(shape, "layer split", 8) == pytest.approx(split, abs=4 * norms)
    # One kv head: every device has the caches of all slots.
    tensor = 26 * (layer / 8 + 8 * cache) + embedding / 8
    assert device_bytes(shape, "tensor parallel", 8) == pytest.approx(tensor, rel=0.05)
