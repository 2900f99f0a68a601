"""The adapter starts as the identity, and copies nothing.

qwix attaches LoRA to the outermost `__call__` only; a forward pass that bypasses it silently
computes the base. So the tests of each forward pass in use, in sampler and learner, compare it
under a nonzero adapter, and show that every part of the adapter has a gradient.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import Lora
from pipeline.compute.model import lora
from tests import tiny

TOKENS = np.random.default_rng(0).integers(8, tiny.VOCAB, (2, 14)).astype(np.int32)


def test_a_fresh_adapter_is_the_identity_bit_for_bit():
    policy, base = tiny.policy(layers=2), tiny.base(layers=2)
    fresh = policy.fresh_adapter(3)
    assert all(np.any(value) == name.endswith("_lora_a") for name, value in fresh.items())
    zeros = {name: jnp.zeros_like(value) for name, value in fresh.items()}
    first, second = (tiny.hidden_states(policy, base, each, TOKENS) for each in (fresh, zeros))
    np.testing.assert_array_equal(first, second)
    same, other = (lora.sha256(policy.fresh_adapter(seed)) for seed in (3, 4))
    assert lora.sha256(fresh) == same != other


def test_the_delta_is_alpha_over_rank_times_a_times_b():
    adapter = {"x.gate_proj.kernel_lora_a": jnp.array([[1.0], [2.0]])}
    adapter["x.gate_proj.kernel_lora_b"] = jnp.array([[3.0, 5.0, 7.0]])
    found = lora.delta("x.gate_proj.kernel", adapter, lora=Lora(rank=1, alpha=2.0))
    np.testing.assert_array_equal(found, [[6.0, 10.0, 14.0], [12.0, 20.0, 28.0]])
    assert lora.delta("x.up_proj.kernel", adapter, lora=Lora(rank=1, alpha=2.0)) is None


ATTENTION = {"attn.q_einsum.w", "attn.kv_einsum.w", "attn.attn_vec_einsum.w"}
MLP = {"mlp.gate_proj.kernel", "mlp.up_proj.kernel", "mlp.down_proj.kernel"}


@pytest.mark.parametrize(
    ("targets", "layers", "matrices"),
    [
        ("attention", range(7), ATTENTION),
        ("mlp", range(7), MLP),
        ("all", range(7), ATTENTION | MLP),
        (r"layers/[05]/(attn/q_einsum|mlp/.*)", (0, 5), {"attn.q_einsum.w"} | MLP),
    ],
)
def test_targets_select_exactly_their_matrices(targets: Any, layers: Any, matrices: set[str]):
    policy = tiny.make_policy(lora=tiny.LORA.model_copy(update={"targets": targets}))
    assert set(policy.adapter_shapes) == {
        f"layers.{layer}.{matrix}_lora_{part}"
        for layer in layers
        for matrix in matrices
        for part in "ab"
    }
    for name, shape in policy.adapter_shapes.items():
        rank = shape.shape[-1] if name.endswith("_a") else shape.shape[0]
        assert rank == tiny.LORA.rank, name


def test_the_hash_covers_names_shapes_and_values():
    adapter = {"a": np.array([1.0, 2.0], np.float32), "b": np.zeros((1, 2), np.float32)}
    same = lora.sha256({name: jnp.asarray(adapter[name]) for name in ("b", "a")})
    assert lora.sha256(adapter) == same
    others = [
        {"a": adapter["a"], "c": adapter["b"]},
        {"a": adapter["a"], "b": adapter["b"].T},
        {"a": adapter["a"] + np.float32(1e-6), "b": adapter["b"]},
        {"a": adapter["a"], "b": -adapter["b"]},
    ]
    assert len({same, *map(lora.sha256, others)}) == len(others) + 1


def test_norms_of_a_change_by_hand():
    # A B = [[2, 0, 4], [0, 3, 0]] / [[1, 1, 1]]; scale 2.
    adapter = {
        "layers.0.attn.q_einsum.w_lora_a": jnp.array([[2.0, 0.0], [0.0, 1.0]]),
        "layers.0.attn.q_einsum.w_lora_b": jnp.array(
            [[[1.0], [0.0], [2.0]], [[0.0], [3.0], [0.0]]]
        ),
        "layers.5.mlp.down_proj.kernel_lora_a": jnp.array([[1.0, 0.0]]),
        "layers.5.mlp.down_proj.kernel_lora_b": jnp.array([[1.0, 1.0, 1.0], [9.0, 9.0, 9.0]]),
    }
    settings = Lora(rank=2, alpha=4.0)
    found = lora.norms(adapter, lora=settings, layers=6)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {
            "adapter_norm": 2 * np.sqrt(29 + 3),
            "adapter_norm/early_attention": 2 * np.sqrt(29),
            "adapter_norm/late_mlp": 2 * np.sqrt(3),
        }
    )


def test_a_fresh_adapter_has_pefts_initialisation():
    """`kaiming_uniform_(a=sqrt(5))` of torch: uniform within 1 / sqrt(inputs); B is zero."""
    shapes = {
        "q_lora_a": jax.ShapeDtypeStruct((640, 16), jnp.float32),
        "o_lora_a": jax.ShapeDtypeStruct((4, 160, 16), jnp.float32),
        "o_lora_b": jax.ShapeDtypeStruct((16, 640), jnp.float32),
    }
    adapter = lora.fresh(shapes, seed=0)
    assert not np.asarray(adapter["o_lora_b"]).any()
    for name in ("q_lora_a", "o_lora_a"):
        values = np.abs(np.asarray(adapter[name]))
        assert 0.99 * 640**-0.5 < values.max() <= 640**-0.5
        assert values.mean() == pytest.approx(640**-0.5 / 2, rel=0.02)


@pytest.mark.parametrize(("dtype", "precise"), [("float32", True), ("bfloat16", False)])
def test_only_a_float32_model_asks_for_the_highest_precision(dtype: str, precise: bool):
    policy = tiny.make_policy(dtype=dtype, num_hidden_layers=1)
    program = policy.jit(lambda x: x @ x).lower(jnp.ones((2, 2)))
    assert ("HIGHEST" in program.as_text()) == precise
