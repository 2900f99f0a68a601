"""A quantized base: size, error, and the same values in every program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core import numerics

from pipeline.compute.model import quantize
from pipeline.compute.model.policy import Params, Policy
from tests import tiny


def quantized(kind: str, *, devices: int = 1, dtype: str = "float32") -> tuple[Policy, Params]:
    policy = tiny.make_policy(num_hidden_layers=2, quantization=kind, devices=devices, dtype=dtype)
    plain = tiny.make_policy(num_hidden_layers=2, devices=devices, dtype=dtype)
    return policy, policy.stored_base(tiny.make_base(plain).items())


@pytest.mark.parametrize(
    ("kind", "dtype"), [("int8", "bfloat16"), ("nf4", "float32"), ("int8_matmul", "float32")]
)
def test_matrices_are_within_the_rounding_error_and_nothing_else_changes(kind: str, dtype: str):
    policy, base = quantized(kind, dtype=dtype)
    assert {n: (v.shape, v.dtype) for n, v in base.items()} == {
        n: (s.shape, s.dtype) for n, s in policy.base_shapes.items()
    }
    exact = tiny.make_base(tiny.make_policy(num_hidden_layers=2, dtype=dtype))
    found = dict(policy.parameters(base))
    assert list(found) == list(policy.plain_shapes)
    # Relative to the block's largest weight: half a step of 1/127.5, half the widest gap between
    # two of NF4's 16 values; and the rounding of the dequantized value.
    step = {"nf4": 0.5 * (1 - 0.6961928)}.get(kind, 0.5 / 127.5)
    rounding = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
    for name, value in exact.items():
        assert found[name].dtype == value.dtype
        error = jnp.abs(found[name].astype(jnp.float32) - value.astype(jnp.float32)).max()
        largest = float(jnp.abs(value).max())
        if name.endswith((".w", ".kernel")):
            assert 0 < float(error) <= (step + rounding) * largest, name
        else:
            assert float(error) == 0, name


def test_nf4_equals_qwix():
    values = jax.random.normal(jax.random.key(0), (4, 500)) / 2
    codes = quantize._nearest_nf4(values)
    np.testing.assert_array_equal(codes, numerics.fp_to_nf4(values))
    np.testing.assert_array_equal(quantize._nf4_values(codes), numerics.nf4_to_fp(codes))
    assert len(np.unique(codes)) == 16


def test_the_base_is_quantized_during_loading(tmp_path: Path):
    """Only one plain matrix exists at a time."""
    policy = tiny.make_policy(num_hidden_layers=2, quantization="nf4")
    base = tiny.make_base(policy.plain())
    asked: list[str] = []
    live: list[int] = []

    def one_by_one() -> Any:
        for name in policy.plain_shapes:
            asked.append(name)
            live.append(sum(x.nbytes for x in jax.live_arrays() if x.shape == (24, 40)))
            yield name, base[name] + 0

    before = sum(x.nbytes for x in jax.live_arrays() if x.shape == (24, 40))
    kept = policy.stored_base(one_by_one())
    assert asked == list(policy.plain_shapes)
    assert max(live) - before <= 24 * 40 * 4
    assert kept.keys() == policy.base_shapes.keys()
