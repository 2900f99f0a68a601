"""The forward pass: causal, the same for any remat, and traced once for each kind of layer."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute.model.attention import Layout, PackedAttention
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.remat import Parts, Remat
from pipeline.compute.model.sharding import by_row, make_mesh
from tests import tiny

SEQ = 3 * tiny.WINDOW
TOKENS = np.random.default_rng(0).integers(8, tiny.VOCAB, (2, SEQ)).astype(np.int32)


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": tiny.GEMMA2 | {"num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 2},
    "gemma4": tiny.GEMMA4,
    # The first two layers are like the next two, whose keys and values the last two read.
    "gemma4 of six layers": tiny.GEMMA4
    | {"num_hidden_layers": 6, "layer_types": 3 * ["sliding_attention", "full_attention"]},
}
FOUR = np.concatenate([TOKENS, TOKENS[::-1] + 1])


def value_and_gradient(policy: Policy, remat: Remat | None, tokens: np.ndarray = FOUR) -> Any:
    """Value and gradient of an arbitrary loss on packed rows."""
    segments = np.repeat([[1, 2]], len(tokens), axis=0).repeat(SEQ // 2, axis=1)
    positions = np.broadcast_to(np.arange(SEQ) % (SEQ // 2), tokens.shape)

    def loss(adapter: Params, base: Params, *rows: jax.Array) -> jax.Array:
        tokens, positions, segments = rows
        model = policy.bind(base, adapter, exact=remat is not None)
        attend = PackedAttention(Layout(positions, segments))
        hidden, _ = model(tokens, positions, attend=attend, remat=remat)
        return jnp.sum(jnp.sin(hidden.astype(jnp.float32)))

    rows = jax.device_put((tokens, positions, segments), by_row(policy.mesh))
    base, adapter = tiny.make_base(policy), tiny.make_probe(policy)
    return jax.jit(jax.value_and_grad(loss))(adapter, base, *rows)


def assert_close(found: Any, expected: Any, *, relative: float) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=relative)
    for name, grad in expected[1].items():
        scale = float(jnp.abs(grad).max())
        assert scale > 0
        np.testing.assert_allclose(
            found[1][name], grad, rtol=0, atol=relative * scale, err_msg=name
        )


@cache
def without_remat(family: str) -> Any:
    return value_and_gradient(tiny.make_policy(**FAMILIES[family]), None)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("remat", "mesh", "family"),
    [
        (Remat("none", SEQ), {}, "gemma3"),
        (Remat("dots", 2 * SEQ), {}, "gemma3"),
        (Remat("full", 1), {}, "gemma3"),  # at least one row
        slow(Remat("offload", SEQ), {}, "gemma3"),
        slow(Remat("full", SEQ), {}, "gemma2"),
        (Remat("full", SEQ), {"devices": 4, "fsdp": 2, "tp": 2}, "gemma3"),
        slow(Remat("none", 2 * SEQ), {}, "gemma4"),
        slow(Remat("dots", SEQ), {}, "gemma4"),
        slow(Remat("full", SEQ), {"devices": 4, "fsdp": 2, "tp": 2}, "gemma4"),
        slow(Remat("offload", SEQ), {}, "gemma4"),
        slow(Remat("full", SEQ), {}, "gemma4 of six layers"),
    ],
)
def test_remat_changes_no_value_and_no_gradient(remat: Remat, mesh: Any, family: str):
    policy = tiny.make_policy(**mesh, **FAMILIES[family])
    # A change of 1e-7 in the weights of the Gemma 4 changes gradients by 3e-5.
    relative = 1e-4 if family.startswith("gemma4") else 1e-5
    found = value_and_gradient(policy, remat)
    assert_close(found, without_remat(family), relative=relative)


def test_parts_keep_rows_on_their_devices_and_in_order():
    mesh = make_mesh(jax.devices()[:4], fsdp=2)
    rows = jax.device_put(np.arange(8 * 3).reshape(8, 3), by_row(mesh))
    parts = Parts.of(8, 3, tokens=4, mesh=mesh)
    assert parts.count == 2
    split = jax.jit(parts.split)(rows)
    # Each device has two rows: the first of each are the first part.
    np.testing.assert_array_equal(split[:, :, 0] // 3, [[0, 2, 4, 6], [1, 3, 5, 7]])
    np.testing.assert_array_equal(parts.join(split), rows)
    assert Parts.of(12, 3, tokens=7, mesh=make_mesh(jax.devices()[:1])).count == 6


def test_the_gradient_of_parts_is_summed_in_float32():
    policy = tiny.make_policy(num_hidden_layers=1, dtype="bfloat16")
    two, six = (
        value_and_gradient(policy, Remat("full", SEQ), np.repeat(TOKENS[:1], rows, axis=0))[1]
        for rows in (2, 6)
    )
    for name, grad in two.items():
        # Equal parts: only a sum in bfloat16 would round multiples of the summand.
        np.testing.assert_allclose(six[name], 3 * grad, rtol=1e-6, err_msg=name)
