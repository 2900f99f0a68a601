"""A quantized base: size, error, and the same values in every program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core import numerics

from pipeline.compute.learner.learner import Learner
from pipeline.compute.model import quantize
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from tests import tiny
from tests.pipeline.compute.learner.test_learner import UNCLIPPED, close, gradient, start

TOKENS = np.random.default_rng(0).integers(8, tiny.VOCAB, (8, 20)).astype(np.int32)


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


def test_four_bit_codes_are_packed_two_to_a_byte():
    codes = jnp.arange(16, dtype=jnp.uint4).reshape(2, 8)
    kept = quantize.pack(codes)
    assert (kept.shape, kept.dtype) == ((2, 4), jnp.uint8)
    np.testing.assert_array_equal(kept[0], [0x10, 0x32, 0x54, 0x76])
    np.testing.assert_array_equal(quantize.unpack(kept, jnp.dtype("uint4")), codes)


def test_nf4_equals_qwix():
    values = jax.random.normal(jax.random.key(0), (4, 500)) / 2
    codes = quantize._nearest_nf4(values)
    np.testing.assert_array_equal(codes, numerics.fp_to_nf4(values))
    np.testing.assert_array_equal(quantize._nf4_values(codes), numerics.nf4_to_fp(codes))
    assert len(np.unique(codes)) == 16


def test_the_gradient_equals_that_of_the_dequantized_base():
    policy, base = quantized("nf4")
    config, plain = tiny.make_config(learner=UNCLIPPED), dict(policy.parameters(base))
    one = Learner(policy, base, config, tiny.VOCABULARY)
    other = Learner(policy.plain(), plain, config, tiny.VOCABULARY)
    (found, metrics), (expected, others) = (
        gradient(start(learner, tiny.make_probe(policy))) for learner in (one, other)
    )
    close(found, expected, bound=1e-4)
    assert metrics == pytest.approx(others, rel=1e-4)


def test_matrices_without_an_adapter_are_quantized_too():
    settings = tiny.LORA.model_copy(update={"targets": "attention"})
    policy = tiny.make_policy(num_hidden_layers=1, quantization="nf4", lora=settings, separate=True)
    kept = {name for name in policy.base_shapes if name.endswith(".array.qvalue")}
    assert "layers.0.mlp.up_proj.kernel.array.qvalue" in kept
    assert len(kept) == 6
    assert not [name for name in policy.adapter_shapes if "mlp" in name]
    assert policy.plain().adapter_shapes == policy.adapter_shapes
    hidden = jax.eval_shape(
        lambda base, adapter: policy.bind(base, adapter)(jnp.asarray(TOKENS), jnp.asarray(TOKENS)),
        *policy.abstract_params(),
    )[0]
    assert hidden.shape == (8, 20, 24)


GEMMA3_1B: dict[str, Any] = {
    "num_hidden_layers": 26,
    "vocab_size": 262_144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "gb"), [("none", 2.000), ("int8", 1.324), ("nf4", 0.975)])
def test_bytes_of_gemma3_1b(kind: str, gb: float):
    shape = architecture(tiny.hf_config(**GEMMA3_1B), dtype=jnp.dtype("bfloat16"))
    mesh = make_mesh(jax.devices()[:1])
    policy = Policy(shape, lora=tiny.LORA, mesh=mesh, quantization=kind)
    size = sum(s.size * s.dtype.itemsize for s in policy.base_shapes.values())
    assert size / 1e9 == pytest.approx(gb, abs=5e-4)
    # Every block has 64 weights: one scale of two bytes for each.
    scales = [s for name, s in policy.base_shapes.items() if name.endswith(".array.scale")]
    weights = sum(s.size for name, s in policy.plain_shapes.items() if name[-2:] in {".w", "el"})
    assert kind == "none" or sum(s.size for s in scales) * 64 == weights


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
