"""The forward pass against Tunix's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.models.gemma3 import model as gemma3

from pipeline.model.policy import Params
from tests import tiny

SEQ = 3 * tiny.WINDOW
TOKENS = np.random.default_rng(0).integers(8, tiny.VOCAB, (2, SEQ)).astype(np.int32)


def hidden(base: Params, adapter: Params, tokens: Any) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return tiny.policy().bind(base, adapter)(jnp.asarray(tokens), positions)[0]


@pytest.fixture(scope="module")
def run() -> Any:
    return jax.jit(hidden)


def test_logits_are_tunixs(run: Any):
    config = tiny.policy().architecture.config
    model = nnx.eval_shape(lambda: gemma3.Gemma3(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    base = tiny.base()
    flat = [
        (path, variable.replace(base[".".join(map(str, path))]))
        for path, variable in nnx.to_flat_state(state)
    ]

    @jax.jit
    def logits(state: nnx.State) -> jax.Array:
        causal = jnp.tril(jnp.ones((SEQ, SEQ), bool))[None].repeat(len(TOKENS), 0)
        positions = jnp.broadcast_to(jnp.arange(SEQ), TOKENS.shape)
        return nnx.merge(graphdef, state)(jnp.asarray(TOKENS), positions, None, causal)[0]

    ours = run(base, tiny.policy().no_adapter(), TOKENS) @ base["embedder.input_embedding"].T
    np.testing.assert_allclose(
        ours, logits(nnx.from_flat_state(flat)), rtol=0, atol=2e-5 * float(jnp.abs(ours).max())
    )


def test_padding_behind_a_row_changes_nothing(run: Any):
    length = SEQ - 5
    other = TOKENS.copy()
    other[:, length:] = 0
    base, adapter = tiny.base(), tiny.probe()
    first, second = (np.asarray(run(base, adapter, tokens)) for tokens in (TOKENS, other))
    np.testing.assert_array_equal(first[:, :length], second[:, :length])
    assert (first[:, length:] != second[:, length:]).any()


def test_a_token_is_seen_by_later_ones_only(run: Any):
    base, adapter = tiny.base(), tiny.probe()
    other = TOKENS.copy()
    other[:, 4] += 1
    first, second = (np.asarray(run(base, adapter, tokens)) for tokens in (TOKENS, other))
    changed = (first != second).any(axis=(0, 2))
    assert not changed[:4].any()
    # Also beyond the reach of the local layers alone: the global one is in the middle.
    assert changed[4:].all()


@pytest.mark.parametrize("changes", [{}, tiny.GEMMA2], ids=["gemma3", "gemma2"])
def test_rematerialisation_changes_no_value_and_no_gradient(changes: dict[str, Any]):
    policy = tiny.make_policy(num_hidden_layers=2, **changes)
    base, adapter = tiny.make_base(policy), tiny.make_probe(policy)

    def loss(adapter: Params, base: Params, *, remat: bool) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(SEQ), TOKENS.shape)
        hidden, _ = policy.bind(base, adapter)(jnp.asarray(TOKENS), positions, remat=remat)
        return jnp.mean(jnp.sin(hidden))

    both = jax.jit(jax.value_and_grad(loss), static_argnames="remat")
    value, grads = both(adapter, base, remat=False)
    again, regrads = both(adapter, base, remat=True)
    np.testing.assert_allclose(value, again, rtol=1e-5)
    for name, grad in grads.items():
        scale = float(jnp.abs(grad).max())
        assert scale > 0
        np.testing.assert_allclose(regrads[name], grad, rtol=0, atol=1e-5 * scale, err_msg=name)
