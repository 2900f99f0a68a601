"""Combination of the loss terms by the settings; tokens that are not learned have no effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.learner import Learner
from pipeline.compute.learner.batches import DeviceBatch, Inputs, TopKLogprobs
from pipeline.compute.learner.objective import gather_tokens, objective
from pipeline.compute.model.head_score import Scores

# Two rollouts in a row: two learned tokens, then one; prompts between, padding at the end.
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0]])
WEIGHTS = jnp.array([[0, 0.25, 0.25, 0, 0.5, 0]])
LEARNED = np.array([1, 2, 4])
ADVANTAGES = jnp.array([[0, 2.0, 2.0, 0, -1.0, 0]])
OLD = jnp.log(jnp.array([[0.5, 0.4, 0.2, 0.5, 0.5, 0.5]]))
# Ratios of the learned tokens: 1.25, 4, 0.25.
POLICY = OLD + jnp.log(jnp.array([[7.0, 1.25, 4.0, 7.0, 0.25, 7.0]]))
TOKENS = jnp.zeros((1, 6), jnp.int32)


def batch(**changes: Any) -> DeviceBatch:
    inputs = Inputs(TOKENS, TOKENS, WEIGHTS, SEGMENTS, TOKENS, None)
    return DeviceBatch(inputs, ADVANTAGES, **({"old_logprobs": OLD} | changes))


def scores(logprobs: Any = POLICY, gathered: Any = None) -> Scores:
    zeros = jnp.zeros((1, 6))
    return Scores(logprobs, zeros, zeros + 0.5, gathered, None)


def at_learned(
    given: DeviceBatch, *, logprobs: Any = POLICY, gathered: Any = None, **settings: Any
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Loss and metrics of the learned tokens."""
    made = Learner(**({"updates_per_batch": 2} | settings))
    given = replace(given, kl_coef=jnp.float32(made.kl_coef))
    loss, about = objective(scores(logprobs, gathered), given, settings=made)
    return np.asarray(loss)[0, LEARNED], {k: np.asarray(v)[0, LEARNED] for k, v in about.items()}


@pytest.mark.parametrize(
    ("settings", "expected", "clipped"),  # clipped: -1 low, 1 high
    [
        ({"loss": "grpo"}, [-2.4, -2.4, 0.8], [1, 1, -1]),
        ({"loss": "dr_grpo"}, [-2.4, -2.4, 0.8], [1, 1, -1]),
        ({"loss": "dapo"}, [-2.5, -2.56, 0.8], [0, 1, -1]),
        ({"loss": "grpo", "clip_epsilon": 0.8}, [-2.5, -3.6, 0.25], [0, 1, 0]),
        # One ratio for the first rollout, sqrt(1.25 x 4); the other has one token.
        ({"loss": "gspo"}, [-2 * 1.0004, -2 * 1.0004, 1 - 3e-4], [1, 1, -1]),
        (
            {"loss": "gspo", "clip_epsilon": 1.0, "clip_epsilon_high": 9.0},
            [-2 * np.sqrt(5), -2 * np.sqrt(5), 0.25],
            [0, 0, 0],
        ),
        # -w A log p with log p = log 0.5, log 0.8, log 0.125
        (
            {"loss": "cispo", "clip_epsilon_high": 2.0},
            [-2.5 * np.log(0.5), -6 * np.log(0.8), 0.25 * np.log(0.125)],
            [0, 1, 0],
        ),
    ],
)
def test_variants_by_hand(settings: dict[str, Any], expected: list[float], clipped: list[int]):
    loss, about = at_learned(batch(), **settings)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(about["policy_loss"], expected, rtol=1e-5)
    np.testing.assert_array_equal(about["clip_fraction"], np.abs(clipped))
    np.testing.assert_array_equal(about["clip_low"], [side < 0 for side in clipped])
    np.testing.assert_array_equal(about["clip_high"], [side > 0 for side in clipped])
    np.testing.assert_array_equal(about["entropy"], [0.5] * 3)
    root = np.sqrt(1.25 * 4)
    ratios = [root, root, 0.25] if settings["loss"] == "gspo" else [1.25, 4, 0.25]
    for name in ("ratio_mean", "ratio_max"):
        np.testing.assert_allclose(about[name], ratios, rtol=1e-5)


@pytest.mark.parametrize("unknown", [None, jnp.full_like(OLD, jnp.nan)])
def test_without_old_log_probs_the_ratio_is_one(unknown: Any):
    loss, about = at_learned(batch(old_logprobs=unknown))
    np.testing.assert_allclose(loss, [-2, -2, 1])
    assert not any(about[name].any() for name in ("clip_fraction", "clip_low", "clip_high"))
    np.testing.assert_array_equal(about["ratio_max"], [1, 1, 1])


SAMPLED = OLD - jnp.log(jnp.array([[9.0, 0.5, 3.0, 9.0, 1.1, 9.0]]))


def test_the_importance_weight_is_per_token_and_multiplies_only_the_policy_loss():
    given = batch(
        old_logprobs=None, processed_logprobs=POLICY - OLD + SAMPLED, reference_logprobs=POLICY + 1
    )
    loss, about = at_learned(given, importance_cap=2.0, kl_coef=0.1, kl="k1")
    np.testing.assert_allclose(about["importance_weight"], [0.5, 2.0, 1.1], rtol=1e-5)
    np.testing.assert_array_equal(about["importance_capped"], [0, 1, 0])
    np.testing.assert_allclose(about["kl"], [-1, -1, -1], rtol=1e-5)
    np.testing.assert_allclose(loss, [-1.0 - 0.1, -4.0 - 0.1, 1.1 - 0.1], rtol=1e-5)


def test_with_gspo_the_importance_weight_is_per_rollout():
    _, about = at_learned(batch(processed_logprobs=SAMPLED), loss="gspo", importance_cap=9.0)
    root = np.sqrt(0.5 * 3)
    np.testing.assert_allclose(about["importance_weight"], [root, root, 1.1], rtol=1e-5)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ("k1", -np.log(2)),
        ("k2", np.log(2) ** 2 / 2),
        ("k3", 1 - np.log(2)),
    ],
)
def test_the_configured_kl_estimator_is_used(kl: str, expected: float):
    plain, _ = at_learned(batch())
    given = batch(reference_logprobs=POLICY + jnp.log(2))
    loss, about = at_learned(given, kl_coef=0.5, kl=kl)
    np.testing.assert_allclose(about["kl"], [expected] * 3, rtol=1e-5)
    np.testing.assert_allclose(loss, plain + 0.5 * expected, rtol=1e-5)


def kept(masses: list[float], tokens: list[int]) -> TopKLogprobs:
    """The same top k at all six positions."""
    logprobs = jnp.broadcast_to(jnp.log(jnp.array(masses)), (1, 6, len(masses)))
    ids = jnp.broadcast_to(jnp.array(tokens, jnp.int32), (1, 6, len(masses)))
    return TopKLogprobs(logprobs, ids, jnp.full((1, 6), np.log(1 - sum(masses))))


def test_reference_and_teacher_each_get_the_log_probs_of_their_own_tokens():
    given = batch(reference=kept([0.6, 0.3], [4, 5]), teacher=kept([0.5, 0.25], [7, 4]))
    tokens = gather_tokens(given)
    assert tokens is not None
    np.testing.assert_array_equal(tokens[0, 0], [4, 5, 7, 4])
    masses = jnp.array([0.2, 0.5, 0.1, 0.2])
    gathered = jnp.broadcast_to(jnp.log(masses), (1, 6, 4))
    settings = {"kl": "topk", "kl_coef": 0.1, "teacher": "t", "distill_coef": 10.0}
    plain, _ = at_learned(batch())
    loss, about = at_learned(given, gathered=gathered, **settings)
    kl = 0.2 * np.log(0.2 / 0.6) + 0.5 * np.log(0.5 / 0.3) + 0.3 * np.log(0.3 / 0.1)
    distilled = 0.5 * np.log(0.5 / 0.1) + 0.25 * np.log(0.25 / 0.2) + 0.25 * np.log(0.25 / 0.7)
    np.testing.assert_allclose(about["kl"], [kl] * 3, rtol=1e-5)
    np.testing.assert_allclose(about["distillation"], [distilled] * 3, rtol=1e-5)
    np.testing.assert_allclose(loss, plain + 0.1 * kl + 10 * distilled, rtol=1e-5)
    np.testing.assert_allclose(about["top_mass_reference"], [0.9] * 3, rtol=1e-5)
    np.testing.assert_allclose(about["top_mass_policy"], [0.7] * 3, rtol=1e-5)
    # The sampled token is 0, which is in neither top k.
    np.testing.assert_array_equal(about["sampled_rank"], [2, 2, 2])
    np.testing.assert_array_equal(about["sampled_outside"], [1, 1, 1])
    assert gather_tokens(batch()) is None


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("value", [-200.0, np.nan, -np.inf])
def test_values_outside_the_learned_tokens_have_no_effect(loss: str, value: float):
    made = Learner(loss=loss, updates_per_batch=2, kl_coef=0.1, importance_cap=2.0)  # type: ignore[arg-type]

    def total(logprobs: jax.Array, other: float) -> jax.Array:
        beside = [jnp.where(WEIGHTS > 0, x, other) for x in (OLD, SAMPLED, OLD + 0.1)]
        given = batch(
            old_logprobs=beside[0],
            processed_logprobs=beside[1],
            reference_logprobs=beside[2],
            kl_coef=jnp.float32(made.kl_coef),
        )
        values, _ = objective(scores(logprobs), given, settings=made)
        return jnp.sum(jnp.where(WEIGHTS > 0, values * WEIGHTS, 0.0))

    expected = jax.value_and_grad(total)(POLICY, 0.0)
    found = jax.value_and_grad(total)(POLICY, value)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    assert not np.asarray(expected[1])[0, [0, 3, 5]].any()
