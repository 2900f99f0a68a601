"""Hugging Face's results, from files written by tests/golden/make_golden.py."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import Lora
from pipeline.compute.decode.engine import Engine
from pipeline.compute.learner.scorer import Scorer
from pipeline.compute.model.head import scaled_logits
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.compute.opening import open_policy
from pipeline.types import RolloutName, RolloutRequest
from tests import tiny

GOLDEN = Path(__file__).parents[3] / "golden"
NOTHING_SPECIAL = Vocabulary(pad=0, stops=(), forbidden=())

VARIANTS = ("gemma3_scaled", "gemma3_vision", "gemma4_multimodal")

Golden = tuple[dict[str, np.ndarray], Policy, Params]


@pytest.fixture(scope="module", params=["gemma3", "gemma2", "gemma4", *VARIANTS])
def golden(request: pytest.FixtureRequest) -> Golden:
    folder = GOLDEN / request.param
    mesh = make_mesh(jax.devices()[:1])
    policy, base = open_policy(folder, dtype="float32", lora=Lora(rank=2), mesh=mesh)
    return dict(np.load(folder / "golden.npz")), policy, base


def test_logits_equal_those_of_hugging_face(golden: Golden):
    stored, policy, base = golden
    tokens = stored["tokens"]
    assert tokens.shape[1] >= 4 * policy.architecture.config.sliding_window_size

    @jax.jit
    def logits(base: Params, adapter: Params) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = policy.bind(base, adapter)(jnp.asarray(tokens), positions)
        return scaled_logits(
            hidden,
            policy.embedding(base),
            softcap=policy.architecture.shape.final_softcap,
            temperature=1.0,
            forbidden=NOTHING_SPECIAL.forbidden_mask(policy.vocab_size),
        )

    found = logits(base, policy.no_adapter())
    np.testing.assert_allclose(found, stored["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "golden",
    [
        *("gemma3", "gemma2", "gemma4"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS),
    ],
    indirect=True,
)
def test_greedy_continuations_equal_those_of_hugging_face(golden: Golden):
    stored, policy, base = golden
    names = [RolloutName("test", 0, prompt_id=number, sample=0) for number in range(3)]
    new = stored["greedy_0"].size
    config = tiny.make_config(
        rollout={"max_prompt_tokens": 20, "max_new_tokens": new}, plan={"segment_steps": 10}
    )
    completions = Engine(policy, base, config, NOTHING_SPECIAL).generate(
        [RolloutRequest(name, stored[f"prompt_{name.prompt_id}"]) for name in names],
        adapter=policy.no_adapter(),
        version=0,
        adapter_sha256="",
        temperature=0.0,
    )
    for name, completion in zip(names, completions, strict=True):
        np.testing.assert_array_equal(completion.tokens, stored[f"greedy_{name.prompt_id}"])
        assert completion.stop_reason == "length"


# All other tests of sampler and learner use Gemma 3.
@pytest.mark.parametrize("golden", ["gemma2", "gemma4"], indirect=True)
def test_promise_1_sampler_and_learner_agree_on_other_gemmas(golden: Golden):
    stored, policy, base = golden
    prompt = stored["prompt_1"]
    config = tiny.make_config(
        rollout={"max_prompt_tokens": 20, "max_new_tokens": 20, "temperature": 0.7},
        plan={"slots": 1},
    )
    adapter = tiny.make_probe(policy)
    (drawn,) = Engine(policy, base, config, NOTHING_SPECIAL).generate(
        [RolloutRequest(RolloutName("train", 0, prompt_id=0, sample=0), prompt)],
        adapter=adapter,
        version=0,
        adapter_sha256="",
        temperature=0.7,
    )
    assert len(prompt) + len(drawn.tokens) > 3 * policy.architecture.config.sliding_window_size
    scorer = Scorer(policy, config, NOTHING_SPECIAL)
    (found,) = scorer.score([drawn], adapter=adapter, base=base)
    np.testing.assert_allclose(found, drawn.logprobs, rtol=0, atol=1e-4)
