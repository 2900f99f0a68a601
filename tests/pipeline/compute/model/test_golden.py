"""Hugging Face's results, from files written by tests/golden/make_golden.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs.schema import Config, Lora
from pipeline.compute.decode.engine import Engine
from pipeline.compute.learner.scorer import Scorer
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.compute.opening import make_policy
from pipeline.types import Completion, RolloutName, RolloutRequest
from tests import tiny

GOLDEN = Path(__file__).parents[3] / "golden"
NOTHING_SPECIAL = Vocabulary(pad=0, stops=(), forbidden=())

VARIANTS = ("gemma3_scaled", "gemma3_vision", "gemma4_multimodal")
SHARDED = {"learner_devices": 8, "slots": 8, "fsdp": 2, "tp": 2}
PLANS: dict[str, dict[str, Any]] = {
    "gemma4 sharded": SHARDED,
    "gemma4 in host memory": SHARDED | {"per_layer_embeddings": "host"},
}
"""Sizes of other forms of a Gemma 4; its last layers read the caches of earlier ones."""


@dataclass(frozen=True)
class Golden:
    """A golden model, its stored results, and an engine for it."""

    stored: dict[str, np.ndarray]
    policy: Policy
    base: Params
    config: Config

    @cached_property
    def engine(self) -> Engine:
        return Engine(self.policy, self.base, self.config, NOTHING_SPECIAL)

    def generate(
        self, prompts: Sequence[int], *, adapter: Params, temperature: float
    ) -> list[Completion]:
        """Completions of the stored prompts of these numbers."""
        names = [RolloutName("test", 0, prompt_id=number, sample=0) for number in prompts]
        return self.engine.generate(
            [RolloutRequest(name, self.stored[f"prompt_{name.prompt_id}"]) for name in names],
            adapter=adapter,
            version=0,
            adapter_sha256="",
            temperature=temperature,
        )


@pytest.fixture(scope="module", params=["gemma3", "gemma2", "gemma4", *VARIANTS])
def golden(request: pytest.FixtureRequest) -> Golden:
    folder = GOLDEN / request.param.split()[0]
    stored = dict(np.load(folder / "golden.npz"))
    new = stored["greedy_0"].size
    rollout = {"max_prompt_tokens": 20, "max_new_tokens": new, "temperature": 0.7}
    config = tiny.make_config(
        rollout=rollout, plan={"segment_steps": 10, **PLANS.get(request.param, {})}
    )
    plan = config.plan
    policy = make_policy(
        folder,
        dtype="float32",
        lora=Lora(rank=2),
        mesh=make_mesh(jax.devices()[: plan.learner_devices], fsdp=plan.fsdp, tp=plan.tp),
        embeddings_in_host=plan.embeddings_in_host,
    )
    return Golden(stored, policy, policy.load_base(folder), config)


def test_logits_equal_those_of_hugging_face(golden: Golden):
    policy, tokens = golden.policy, golden.stored["tokens"]
    assert tokens.shape[1] >= 4 * policy.architecture.config.sliding_window_size
    found = tiny.logits(policy, golden.base, policy.no_adapter(), tokens)
    np.testing.assert_allclose(found, golden.stored["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "golden",
    [
        *("gemma3", "gemma2", "gemma4"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in (*VARIANTS, *PLANS)),
    ],
    indirect=True,
)
def test_greedy_continuations_equal_those_of_hugging_face(golden: Golden):
    completions = golden.generate(range(3), adapter=golden.policy.no_adapter(), temperature=0.0)
    for number, completion in enumerate(completions):
        np.testing.assert_array_equal(completion.tokens, golden.stored[f"greedy_{number}"])
        assert completion.stop_reason == "length"


# All other tests of sampler and learner use Gemma 3.
@pytest.mark.parametrize("golden", ["gemma2", "gemma4"], indirect=True)
def test_promise_1_sampler_and_learner_agree_on_other_gemmas(golden: Golden):
    policy = golden.policy
    adapter = tiny.make_probe(policy)
    (drawn,) = golden.generate([1], adapter=adapter, temperature=0.7)
    length = len(drawn.prompt_tokens) + len(drawn.tokens)
    assert length > 3 * policy.architecture.config.sliding_window_size
    scorer = Scorer(policy, golden.config, NOTHING_SPECIAL)
    (found,) = scorer.score([drawn], adapter=adapter, base=golden.base)
    np.testing.assert_allclose(found, drawn.logprobs, rtol=0, atol=1e-4)
