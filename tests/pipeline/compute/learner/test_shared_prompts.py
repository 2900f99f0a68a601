"""Rows that share prompts give the log-probs, gradients and metrics of rows that repeat them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute.learner.learner import Learner
from pipeline.compute.learner.programs import combined
from pipeline.compute.model.policy import Params
from pipeline.compute.model.sharding import by_row
from pipeline.types import Rollout, RolloutName
from tests import tiny
from tests.samples import changed

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
    """Rollouts of random tokens with random advantages; those of a group have the same prompt."""
    found = []
    for group, (prompt, news) in enumerate(GROUPS):
        lengths, advantages = [(prompt, new) for new in news], RNG.standard_normal(len(news))
        drawn = tiny.make_rollouts(lengths, advantages=advantages.tolist(), seed=group)
        for sample, rollout in enumerate(drawn):
            completion = replace(
                changed(rollout.completion, logprobs=near_the_policy(news[sample])),
                name=RolloutName("train", 0, group, sample),
                prompt_tokens=drawn[0].completion.prompt_tokens,
            )
            found.append(replace(rollout, completion=completion))
    return found


def near_the_policy(tokens: int) -> np.ndarray:
    """Random log-probs, about as likely as tokens of the policies below."""
    return (-5.1 + RNG.standard_normal(tokens)).astype(np.float32)


ROLLOUTS = make_rollouts()
OLD = {one.completion.name: near_the_policy(len(one.completion.tokens)) for one in ROLLOUTS}


def make_learner(
    model: dict[str, Any], settings: dict[str, Any], plan: dict[str, Any], *, share: bool
) -> Learner:
    """A learner with rows that share prompts, or do not, and a nonzero adapter."""
    model = {"devices": plan.get("learner_devices", 1), "quantization": "none"} | model
    policy = tiny.make_policy(**model)
    base = tiny.make_base(tiny.make_policy(**{**model, "quantization": "none"}))
    config = tiny.make_config(
        learner={**settings, "share_prefix": share},
        plan=plan,
        model={"quantization": model["quantization"]},
    )
    learner = Learner(policy, policy.stored_base(base.items()), config, tiny.VOCABULARY)
    learner.state = replace(learner.state, adapter=tiny.make_probe(policy))
    return learner


def gradient(learner: Learner) -> tuple[Params, dict[str, float], Values]:
    """Gradient and metrics of an update, and log-probs of the completions' tokens."""
    adapter, batches = learner.state.adapter, learner._pack(ROLLOUTS)
    total, shares, logprobs = jax.tree.map(jnp.zeros_like, adapter), [], Values()
    for batch in batches:
        placed = learner._place(batch)
        if placed.old_logprobs is not None:
            old = np.zeros_like(batch.weights)
            for name, at in batch.completions.items():
                old[at.row, at.positions] = OLD[name]
            placed = replace(placed, old_logprobs=jax.device_put(old, by_row(learner.policy.mesh)))
        program = learner._compiled[f"gradient {len(batch.tokens)}"]
        total, share, scored = program(learner.base, adapter, total, placed)
        shares.append(share)
        array = np.asarray(scored)
        logprobs |= {name: array[at.row, at.positions] for name, at in batch.completions.items()}
    weight = float(sum(batch.weights.sum() for batch in batches))
    return total, combined(shares, weight=weight), logprobs


def num_tokens(learner: Learner) -> int:
    """Number of positions that hold tokens."""
    return sum(batch.tokens.size - batch.num_padded for batch in learner._pack(ROLLOUTS))


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
    apart, shared = (make_learner(model, learner, plan, share=share) for share in (False, True))
    assert num_tokens(apart) == sum(prompt - 1 + new for prompt, news in GROUPS for new in news)
    # Twice in two rows: prompts of 14 and of 3, without their last token.
    once = sum(prompt - 1 + sum(news) for prompt, news in GROUPS)
    assert num_tokens(shared) == once + 13 + 2

    expected, metrics, logprobs = gradient(apart)
    found, others, own = gradient(shared)
    completions = [rollout.completion for rollout in ROLLOUTS]
    scores = shared.score(completions, adapter=shared.state.adapter)
    for completion, scored in zip(completions, scores, strict=True):
        value = logprobs[completion.name]
        np.testing.assert_allclose(own[completion.name], value, rtol=0, atol=1e-5)
        np.testing.assert_allclose(scored, value, rtol=0, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        norm = float(jnp.linalg.norm(grad))
        assert norm > 0, name
        assert float(jnp.linalg.norm(found[name] - grad)) < bound * norm, name
    assert others == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    # Tokens on both sides of the bounds; of one update no token is clipped.
    names = {"importance_capped", *(["clip_fraction"] if "updates_per_batch" in learner else [])}
    for name in names & metrics.keys():
        assert bool(learner) == (0.01 < metrics[name] < 0.99), name
