"""Products of 8-bit integers: exact without rounding, bounded error with it, same everywhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core import qarray

from pipeline.compute.decode.engine import Engine
from pipeline.compute.learner.scorer import Scorer
from pipeline.compute.model import integer_products, quantize
from tests import tiny

EINSUMS = {
    "BTD,NDH->BTNH": ((2, 5, 24), (4, 24, 8)),
    "BSD,CKDH->CBSKH": ((2, 5, 24), (2, 3, 24, 8)),
    "BTD,SNDH->SBTNH": ((2, 5, 24), (3, 4, 24, 8)),
    "BTNH,NHD->BTD": ((2, 5, 4, 8), (4, 8, 24)),
}
LINEAR = (((2,), (0,)), ((), ()))


def matrix(codes: Any, scale: Any) -> qarray.QArray:
    return qarray.QArray(jnp.asarray(codes, jnp.int8), jnp.asarray(scale), None, jnp.dtype("int8"))


def random(equation: str) -> tuple[jax.Array, qarray.QArray]:
    """Activations, and a matrix with one scale per output."""
    x_shape, shape = EINSUMS[equation]
    x_key, codes_key, scale_key = jax.random.split(jax.random.key(0), 3)
    x_letters, letters = equation.partition("->")[0].split(",")
    sizes = [1 if a in x_letters else size for a, size in zip(letters, shape, strict=True)]
    codes = jax.random.randint(codes_key, shape, -127, 128, jnp.int8)
    scale = jax.random.uniform(scale_key, sizes, minval=0.5, maxval=2.0) / 127
    return jax.random.normal(x_key, x_shape), matrix(codes, scale)


def test_a_product_of_small_integers_is_exact():
    # Each position's maximum is 127 times a power of two, so its scale is a power of two.
    x = jnp.array([[[127.0, -3, 2], [254, 2, -4], [0, 0, 0]]])
    codes = [[1, -2], [5, 0], [7, 127]]
    found = integer_products.dot_general(x, matrix(codes, [[1.0, 0.5]]), LINEAR)
    np.testing.assert_array_equal(found, [[[126, 0], [236, -508], [0, 0]]])
    heads = matrix(jnp.asarray(codes)[None], [[[1.0, 0.5]]])
    np.testing.assert_array_equal(
        integer_products.einsum("BTD,NDH->BTNH", x, heads)[:, :, 0], found
    )


def test_a_position_is_rounded_to_the_nearest_of_its_own_codes():
    x = jnp.array([[1.0, 0.5, -1.0, 0.004], [100.0, 0.5, 0.3, -60], [1e-44, 0, 0, 0]])
    codes, scale = integer_products.round_positions(x, [1])
    assert codes.dtype == jnp.int8
    np.testing.assert_array_equal(codes, [[127, 64, -127, 1], [127, 1, 0, -76], [0, 0, 0, 0]])
    np.testing.assert_allclose(scale[:2, 0], [1 / 127, 100 / 127], rtol=1e-6)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_nan_and_infinity_stay_nonfinite(value: float):
    x = jnp.array([[[value, 1.0, 2.0], [1.0, 1.0, 2.0]]])
    found = integer_products.dot_general(x, matrix(jnp.ones((3, 2)), jnp.ones((1, 2))), LINEAR)
    assert not np.isfinite(found[0, 0]).any()
    assert np.isfinite(found[0, 1]).all()


@pytest.mark.parametrize("equation", EINSUMS)
def test_a_product_is_near_the_dequantized_one_and_has_its_gradient(equation: str):
    x, kept = random(equation)
    weights = quantize.dequantize(kept)

    def product(x: jax.Array) -> jax.Array:
        return integer_products.einsum(equation, x, kept)

    wanted, back = jax.vjp(lambda x: jnp.einsum(equation, x, weights), x)
    found, ours = jax.vjp(product, x)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    # Half a step of 1/127 of the maximum of 24 to 32 normal activations, about 2.2 sigma.
    error = float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))
    assert 1e-3 < error < 1e-2
    cotangent = jax.random.normal(jax.random.key(1), found.shape)
    np.testing.assert_array_equal(ours(cotangent)[0], back(cotangent)[0])


def test_sampler_and_learner_round_alike():
    policy, adapter = (
        tiny.make_policy(num_hidden_layers=2, quantization="int8_matmul"),
        tiny.probe(layers=2),
    )
    base = policy.stored_base(tiny.base(layers=2).items())
    config = tiny.make_config(model={"quantization": "int8_matmul"})
    drawn = Engine(policy, base, config, tiny.VOCABULARY).generate(
        tiny.make_requests([3, 14]), adapter=adapter, version=0, adapter_sha256="", temperature=0.8
    )
    scored = Scorer(policy, config, tiny.VOCABULARY).score(drawn, adapter=adapter, base=base)
    sampled = np.concatenate([completion.logprobs for completion in drawn])
    assert len(sampled) > 10
    # The same rounding, except for values half-way between two codes.
    np.testing.assert_allclose(np.concatenate(scored), sampled, rtol=0, atol=5e-3)
