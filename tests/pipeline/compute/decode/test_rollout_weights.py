"""The sampler's weights: the same policy in another form, and never two copies."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import Config
from pipeline.compute.decode.rollout_weights import RolloutWeights
from pipeline.compute.model.policy import Params, Policy
from tests import tiny

TOKENS = np.random.default_rng(0).integers(8, tiny.VOCAB, (4, 20)).astype(np.int32)
MANY: dict[str, Any] = {"devices": 8, "fsdp": 2, "tp": 2}


def config(kind: str, **plan: Any) -> Config:
    return tiny.make_config(learner={"importance_cap": 2.0}, plan={"rollout_weights": kind, **plan})


def opened(kind: str, policy: Policy | None = None) -> RolloutWeights:
    policy = policy or tiny.policy(layers=2)
    return RolloutWeights(policy, tiny.make_base(policy), config(kind))


def assert_own(found: Params, base: Params) -> None:
    """Checks that only matrices of layers are copied."""
    own = [name for name in base if not name.endswith((".w", ".kernel"))]
    assert "embedder.input_embedding" in own
    assert len(own) > 10
    for name in own:
        assert found[name] is base[name], name


# With as many kv heads as query heads, queries, keys and values share one matrix.
@pytest.mark.parametrize(("kv_heads", "separate"), [(2, False), (4, True)])
def test_merged_weights_equal_base_plus_adapter(kv_heads: int, separate: bool):
    policy = tiny.make_policy(num_hidden_layers=2, num_key_value_heads=kv_heads, separate=separate)
    base, adapter = tiny.make_base(policy), tiny.make_probe(policy)
    weights = RolloutWeights(policy, base, config("merged"))
    weights.load(adapter)
    assert weights.adapter == weights.policy.adapter_shapes == {}
    expected = tiny.hidden_states(policy, base, adapter, TOKENS)
    found = tiny.hidden_states(weights.policy, weights.base, {}, TOKENS)
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)
    without = tiny.hidden_states(policy, base, policy.no_adapter(), TOKENS)
    assert float(jnp.abs(without - expected).max()) > 0.1 * scale
    assert_own(weights.base, base)


def test_a_second_load_replaces_the_first_completely(monkeypatch: pytest.MonkeyPatch):
    weights = opened("merged")
    policy, plain = weights.policy, dict(weights.base)
    adapters = [tiny.make_probe(tiny.policy(layers=2), seed=seed) for seed in (1, 2)]
    weights.load(adapters[0])
    first = dict(weights.base)
    copied = [name for name in plain if first[name] is not plain[name]]
    assert len(copied) == 12
    live: list[int] = []

    def watched(merge: Any) -> Any:
        def run(*arrays: Any) -> Any:
            live.append(sum(first[name].is_deleted() for name in copied))
            return merge(*arrays)

        return run

    programs = {name: watched(merge) for name, merge in weights._merge.items()}
    monkeypatch.setattr(weights, "_merge", programs)
    weights.load(adapters[1])
    # Each matrix is freed before its successor is made.
    assert live == list(range(1, 13))
    fresh = RolloutWeights(tiny.policy(layers=2), plain, config("merged"))
    fresh.load(adapters[1])
    for name, value in plain.items():
        np.testing.assert_array_equal(weights.base[name], fresh.base[name], err_msg=name)
        assert not value.is_deleted()
    assert weights.policy is policy


@pytest.mark.parametrize("kind", ["int8", "int8_matmul"])
def test_integer_weights_are_those_of_a_quantized_base(kind: str):
    plain, base, adapter = tiny.policy(layers=2), tiny.base(layers=2), tiny.probe(layers=2)
    weights = RolloutWeights(plain, base, config(kind))
    weights.load(adapter)
    policy = tiny.make_policy(num_hidden_layers=2, quantization=kind)
    kept = policy.stored_base(base.items())
    assert weights.policy.quantization == kind
    assert weights.adapter is adapter
    assert weights.base.keys() == kept.keys()
    for name, value in kept.items():
        np.testing.assert_array_equal(weights.base[name], value, err_msg=name)
    assert_own(weights.base, base)
    # A dedicated sampler has quantized the base at load.
    again = RolloutWeights(policy, kept, config(kind))
    assert again.policy is policy
    assert all(again.base[name] is kept[name] for name in kept)


@pytest.mark.parametrize(
    "kind", ["merged", "int8", pytest.param("int8_matmul", marks=pytest.mark.slow)]
)
def test_copies_are_sharded_like_the_base(kind: str):
    policy, one = tiny.make_policy(num_hidden_layers=2, **MANY), opened(kind)
    many = RolloutWeights(policy, tiny.make_base(policy), config(kind))
    for weights in (one, many):
        weights.load(tiny.make_probe(policy if weights is many else tiny.policy(layers=2)))
    places, _ = many.policy.abstract_params()
    assert many.base.keys() == places.keys() == one.base.keys()
    split = 0
    for name, value in many.base.items():
        assert value.sharding.is_equivalent_to(places[name].sharding, value.ndim), name
        split += not value.sharding.is_fully_replicated
        np.testing.assert_allclose(value, one.base[name], rtol=0, atol=1e-6, err_msg=name)
    assert split >= 12
