"""`launch.bench mesh`: the layer split computes what one device computes; a quick run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.bench import small_gemma
from launch.bench.layer_split import LayerSplit
from launch.bench.small_gemma import small_config
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.attention import Layout, PackedAttention
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.remat import Remat
from pipeline.compute.model.sharding import make_mesh

ROWS, LENGTH = 4, 24
REMAT = Remat("full", 4096)


def loss_and_logits(policy, base, adapter, tokens):
    """A loss that depends on all logits, the logits, and the gradient of the adapter."""
    ones = jnp.ones((ROWS, LENGTH), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), ones.shape)

    def loss(adapter):
        hidden, _ = policy.bind(base, adapter, exact=True)(
            tokens, positions, attend=PackedAttention(Layout(positions, ones)), remat=REMAT
        )
        logits = jnp.einsum("btd,vd->btv", hidden, policy.embedding(base))
        return jax.nn.logsumexp(logits, axis=-1).mean(), logits

    return policy.jit(jax.value_and_grad(loss, has_aux=True))(adapter)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 4), (4, 1), (4, 2)])
def test_layer_split_equals_one_device(stages, micro_batches):
    config = small_config()
    shape = architecture(small_gemma.SMALL, dtype=jnp.dtype("float32"))
    rng = np.random.default_rng(0)
    one = Policy(shape, lora=config.lora, mesh=make_mesh(jax.devices()[:1]))
    base, adapter = small_gemma.random_weights(one, rng, scales={})
    tokens = rng.integers(2, 500, (ROWS, LENGTH)).astype(np.int32)
    (_, expected), gradient = loss_and_logits(one, base, adapter, tokens)

    mesh = make_mesh(jax.devices()[:stages], tp=stages)
    split = LayerSplit(shape, lora=config.lora, mesh=mesh, micro_batches=micro_batches)
    places, _ = split.abstract_params()
    stacked = {
        name: jax.device_put(np.asarray(value), places[name].sharding)
        for name, value in split.stack(base).items()
    }
    placed = split.place_adapter(jax.tree.map(np.asarray, split.stack(adapter)))
    (_, logits), found = loss_and_logits(split, stacked, placed, tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-4 * float(jnp.abs(expected).max()))
    for name, value in split.stack(gradient).items():
        bound = 1e-4 * float(jnp.abs(value).max())
        np.testing.assert_allclose(found[name], value, atol=bound, err_msg=name)
