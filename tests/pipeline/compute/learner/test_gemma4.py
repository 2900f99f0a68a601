"""Updates of a Gemma 4, whose last layers attend to keys and values of earlier ones."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute.decode.engine import Engine
from pipeline.compute.learner.learner import Learner
from pipeline.compute.model import lora
from pipeline.compute.model.policy import Params, Policy
from tests import tiny
from tests.pipeline.compute.learner.reference import Whole
from tests.pipeline.compute.learner.test_learner import ALL, UNCLIPPED, close, gradient, start

pytestmark = pytest.mark.slow

TEMPERATURE = tiny.make_config().rollout.temperature


@functools.cache
def policy(**settings: Any) -> Policy:
    return tiny.make_policy(**settings, **tiny.GEMMA4)


def make_learner(*, quantization: str = "none", **tables: dict[str, Any]) -> Learner:
    """A learner of the same base and with the same adapter for any settings."""
    learner = {"learner": UNCLIPPED | tables.pop("learner", {})}
    model = {"model": {"quantization": quantization}}
    config = tiny.make_config(**learner, **model, **tables)
    plan = config.plan
    mesh = {"devices": plan.learner_devices, "fsdp": plan.fsdp, "tp": plan.tp}
    plain = policy(**mesh)
    in_host = config.plan.embeddings_in_host
    found = replace(plain, quantization=quantization, embeddings_in_host=in_host)
    base = found.stored_base(tiny.make_base(plain).items())
    return start(Learner(found, base, config, tiny.VOCABULARY), tiny.make_probe(policy()))


@functools.cache
def expected() -> dict[str, np.ndarray]:
    """The gradient of unpacked rows, from whole logits of the base with the adapter merged."""
    whole, base = Whole.of(ALL), tiny.make_base(policy())
    forbidden = np.isin(np.arange(tiny.VOCAB), tiny.VOCABULARY.forbidden)
    weights = whole.weights("token") * whole.advantages[:, None]

    @jax.jit
    @jax.grad
    def run(adapter: Params, base: Params) -> jax.Array:
        merged = {
            name: lora.merge(name, value, adapter, lora=tiny.LORA) for name, value in base.items()
        }
        plain = policy().without_adapter()
        logits = tiny.logits(plain, merged, {}, whole.tokens) / TEMPERATURE
        scores = jax.nn.log_softmax(jnp.where(forbidden, -jnp.inf, logits))
        picked = jnp.take_along_axis(scores, whole.targets[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(whole.learned, weights * picked, 0.0))

    return {name: np.asarray(grad) for name, grad in run(tiny.make_probe(policy()), base).items()}


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"row_tokens": 130, "micro_batch_tokens": 260, "remat": "offload"},
        {"learner_devices": 8, "slots": 8, "fsdp": 2, "tp": 2, "micro_batch_tokens": 4 * 42},
        {"learner_devices": 8, "slots": 8, "micro_batch_tokens": 8 * 42, "remat": "none"},
        {"per_layer_embeddings": "host"},
    ],
    ids=["one row", "packed rows", "sharded weights", "eight devices", "embeddings in host memory"],
)
def test_the_gradient_equals_that_of_merged_weights(plan: dict[str, Any]):
    found, _ = gradient(make_learner(plan=plan), ALL)
    assert {name.split(".")[2] for name in found} == {"attn", "mlp", "per_layer"}
    close(found, expected(), bound=1e-4)


def test_a_quantized_base_gives_the_gradient_of_its_values():
    learner = make_learner(quantization="nf4")
    found, _ = gradient(learner, ALL)
    plain = learner.policy.plain()
    base = dict(learner.policy.parameters(learner.base))
    config = tiny.make_config(learner=UNCLIPPED)
    other = start(Learner(plain, base, config, tiny.VOCABULARY), tiny.make_probe(plain))
    close(found, gradient(other, ALL)[0], bound=1e-4)


def test_promise_1_the_sampled_policy_is_the_learned_policy():
    learner = make_learner()
    adapter = tiny.make_probe(policy())
    engine = Engine(policy(), learner.base, tiny.make_config(), tiny.VOCABULARY)
    drawn = engine.generate(
        tiny.make_requests([1, 14, 6, 9, 13, 2]),
        adapter=adapter,
        version=0,
        adapter_sha256="",
        temperature=TEMPERATURE,
    )
    scored = learner.score(drawn, adapter=adapter)
    for completion, logprobs in zip(drawn, scored, strict=True):
        np.testing.assert_allclose(completion.logprobs, logprobs, rtol=0, atol=1e-4)
    without = learner.score(drawn, adapter=policy().no_adapter())
    assert np.abs(np.concatenate(without) - np.concatenate(scored)).max() > 0.1
