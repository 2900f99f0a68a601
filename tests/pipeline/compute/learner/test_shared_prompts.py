"""Rows that share prompts give the log-probs, gradients and metrics of rows that repeat them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute.learner.batches import DeviceBatch, place_inputs
from pipeline.compute.learner.programs import LearnerPrograms, combined
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import by_row
from pipeline.data.batching import batches_to_learn
from pipeline.data.packed_batch import TokenBatch
from pipeline.types import NO_TEXT, Completion, Rollout, RolloutName, Segment
from tests import tiny

GROUPS = [(14, (28, 20, 17, 5)), (3, (9, 9, 2, 26)), (1, (4, 6, 1, 2)), (11, (20, 3, 7, 1))]
"""Tokens of each group's prompt and of its completions.

Prompts are longer than the window of 8, shorter, and of one token, which only completions have. In
rows of 64 the groups with prompts of 14 and of 3 tokens are in two rows each.
"""
ROW = 64
RNG = np.random.default_rng(0)
Values = dict[RolloutName, np.ndarray]
"""A value of each token of each completion."""


def make_rollouts() -> list[Rollout]:
    """Rollouts of random tokens with random advantages."""
    rollouts = []
    for number, (length, news) in enumerate(GROUPS):
        prompt = RNG.integers(8, tiny.VOCAB, length).astype(np.int32)
        for sample, new in enumerate(news):
            completion = Completion(
                name=RolloutName("train", 0, number, sample),
                prompt_tokens=prompt,
                segments=(
                    Segment(
                        RNG.integers(8, tiny.VOCAB, new).astype(np.int32),
                        near_the_policy(new),
                        version=0,
                        adapter_sha256="",
                    ),
                ),
                stop_reason="length",
            )
            advantage = float(RNG.standard_normal())
            rollouts.append(Rollout(completion, NO_TEXT, {"r": 0.0}, 0.0, advantage))
    return rollouts


def near_the_policy(tokens: int) -> np.ndarray:
    """Random log-probs, about as likely as tokens of the policies below."""
    return (-5.1 + RNG.standard_normal(tokens)).astype(np.float32)


ROLLOUTS = make_rollouts()
OLD, REFERENCE = (
    {one.completion.name: near_the_policy(len(one.completion.tokens)) for one in ROLLOUTS}
    for _ in range(2)
)


class Packed:
    """The rollouts in rows that share prompts, or do not, and the programs that run on them."""

    def __init__(
        self, policy: Policy, base: Params, tables: Mapping[str, Any], *, share: bool
    ) -> None:
        learner = {**tables.get("learner", {}), "share_prefix": share}
        programs = LearnerPrograms(
            policy, tiny.make_config(**{**tables, "learner": learner}), tiny.VOCABULARY
        )
        self.batches = batches_to_learn(
            ROLLOUTS, config=programs.config, shape=programs.shape, keep_zero_advantage=True
        )
        assert len({batch.tokens.shape for batch in self.batches}) == 1  # programs compile once
        self._programs, self._policy, self._base = programs, policy, base

    @property
    def tokens(self) -> int:
        """Number of positions that hold tokens."""
        return sum(batch.tokens.size - batch.num_padded for batch in self.batches)

    def score(self, adapter: Params) -> Values:
        """Log-probs of the completions' tokens."""
        run, found = self._policy.jit(self._programs.score), Values()
        for batch in self.batches:
            inputs = place_inputs(batch, self._policy.mesh)
            found |= by_name(batch, run(self._base, adapter, inputs))
        return found

    def gradient(self, adapter: Params) -> tuple[Params, dict[str, float], Values]:
        """Gradient and metrics of an update, and log-probs of the completions' tokens."""
        run = self._policy.jit(self._programs.gradient)
        top_k = self._policy.jit(self._programs.reference_top_k)
        total, shares, logprobs = jax.tree.map(jnp.zeros_like, adapter), [], Values()
        for batch in self.batches:
            given = self._place(batch)
            if self._programs.abstract_batch(1).reference is not None:
                reference = top_k(self._base, self._policy.no_adapter(), given["inputs"])
                given["reference"] = reference
            total, share, scored = run(self._base, adapter, total, DeviceBatch(**given))
            shares.append(share)
            logprobs |= by_name(batch, scored)
        weight = float(sum(batch.weights.sum() for batch in self.batches))
        return total, combined(shares, weight=weight), logprobs

    def _place(self, batch: TokenBatch) -> dict[str, Any]:
        """Fields of `DeviceBatch` that the settings use, except for the reference's top k."""
        learner, place = self._programs.config.learner, by_row(self._policy.mesh)

        def spread(values: Values) -> np.ndarray:
            at_positions = np.zeros_like(batch.weights)
            for name, at in batch.completions.items():
                at_positions[at.row, at.positions] = values[name]
            return at_positions

        rows = {"advantages": batch.advantages}
        if learner.importance_cap:
            rows["processed_logprobs"] = batch.processed_logprobs
        if learner.updates_per_batch > 1:
            rows["old_logprobs"] = spread(OLD)
        if learner.kl_coef and learner.kl != "topk":
            rows["reference_logprobs"] = spread(REFERENCE)
        given: dict[str, Any] = jax.device_put(rows, place)
        given["inputs"] = place_inputs(batch, self._policy.mesh)
        return given | ({"kl_coef": jnp.float32(learner.kl_coef)} if learner.kl_coef else {})


def by_name(batch: TokenBatch, values: jax.Array) -> Values:
    """The values at the positions of each completion."""
    array = np.asarray(values)
    return {name: array[at.row, at.positions] for name, at in batch.completions.items()}


# A layer with a window and a global one.
GEMMA3 = {"num_hidden_layers": 2, "sliding_window_pattern": 2}
GEMMA2 = {**tiny.GEMMA2, "num_hidden_layers": 2, "quantization": "int8"}
ONE = {"row_tokens": ROW, "micro_batch_tokens": ROW}
FOUR = {"learner_devices": 4, "slots": 4, "row_tokens": ROW, "micro_batch_tokens": 2 * ROW}
MESH = {"fsdp": 2, "tp": 2}
GSPO = {"loss": "gspo", "clip_epsilon": 0.2, "clip_epsilon_high": 0.3, "importance_cap": 1.1}
CISPO = {"loss": "cispo", "kl_top_k": 4}
NF4 = GEMMA3 | {"quantization": "nf4"}
DAPO = {"loss": "dapo", "importance_cap": 1.1}
TWICE = {"kl_coef": 0.5, "updates_per_batch": 2}
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "learner", "plan", "bound"),
    [
        (GEMMA3, GSPO | TWICE | {"kl": "k3"}, ONE, 1e-5),
        slow(GEMMA3 | MESH, GSPO | TWICE | {"kl": "k3"}, FOUR | MESH, 1e-5),
        slow(GEMMA2, CISPO | TWICE | {"kl": "topk"}, ONE | {"remat": "dots"}, 1e-5),
        # This model multiplies rounding errors: a change of 1e-7 in its weights changes gradients
        # by 6e-5, rows of 80 positions without shared prompts change them by 1e-5.
        slow(tiny.GEMMA4, {}, ONE, 1e-4),
        slow(NF4, DAPO, ONE | {"remat": "none"}, 1e-5),
    ],
    ids=[
        "gemma3, gspo",
        "gemma3 on four devices, gspo",
        "gemma2 in int8, cispo",
        "gemma4, grpo",
        "nf4, dapo",
    ],
)
def test_shared_prompts_change_no_log_prob_no_gradient_and_no_metric(
    model: dict[str, Any], learner: dict[str, Any], plan: dict[str, Any], bound: float
):
    model = {"devices": plan.get("learner_devices", 1), "quantization": "none"} | model
    policy = tiny.make_policy(**model)
    base = tiny.make_base(tiny.make_policy(**{**model, "quantization": "none"}))
    tables = {
        "learner": learner,
        "plan": plan,
        "model": {"quantization": model["quantization"]},
    }
    apart, shared = (
        Packed(policy, policy.stored_base(base.items()), tables, share=share)
        for share in (False, True)
    )
    assert apart.tokens == sum(prompt - 1 + new for prompt, news in GROUPS for new in news)
    # Twice in two rows: prompts of 14 and of 3, without their last token.
    once = sum(prompt - 1 + sum(news) for prompt, news in GROUPS)
    assert shared.tokens == once + 13 + 2

    adapter = tiny.make_probe(policy)
    expected, metrics, logprobs = apart.gradient(adapter)
    found, others, own = shared.gradient(adapter)
    scored = shared.score(adapter)
    assert own.keys() == scored.keys() == logprobs.keys()
    for rollout, value in logprobs.items():
        np.testing.assert_allclose(own[rollout], value, rtol=0, atol=1e-5)
        np.testing.assert_allclose(scored[rollout], value, rtol=0, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        norm = float(jnp.linalg.norm(grad))
        assert norm > 0, name
        assert float(jnp.linalg.norm(found[name] - grad)) < bound * norm, name
    assert others == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    # Tokens on both sides of the bounds.
    for name in {"clip_fraction", "importance_capped"} & metrics.keys():
        assert bool(learner) == (0.01 < metrics[name] < 0.99), name
