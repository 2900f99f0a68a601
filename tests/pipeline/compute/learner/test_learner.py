"""The update against a reference loss, and independence of packing, devices and order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from launch.bench.harness import compilations
from pipeline.compute.learner.learner import Learner
from pipeline.compute.learner.programs import combined
from pipeline.compute.model import lora
from pipeline.types import Rollout, Segment
from tests import tiny
from tests.pipeline.compute.learner.reference import Whole, grpo, log_softmax
from tests.samples import changed

# No gradient clipping, so that Adam's first moment shows the gradient.
UNCLIPPED = {"max_grad_norm": 1e6}
LENGTHS = [(3, 9), (14, 28), (1, 2), (8, 5), (6, 1), (10, 10), (5, 12)]
ADVANTAGES = [1.0, -0.5, 2.0, 0.0, -1.5, 0.7, 0.0]
ROLLOUTS = tiny.make_rollouts(LENGTHS, advantages=ADVANTAGES)
ALL = tiny.make_rollouts(LENGTHS, advantages=[advantage or 0.3 for advantage in ADVANTAGES])
PADDING = {"positions", "tokens_padded", "padded_share"}
"""Metrics that depend on how rollouts are packed."""
WITH_KL = {"kl_coef": 0.5, "token_weights": "sequence"}
TEMPERATURE = tiny.make_config().rollout.temperature
slow = partial(pytest.param, marks=pytest.mark.slow)


def usual(**changes: Any) -> Learner:
    """A learner with micro-batches of one row, and head blocks of 32 positions."""
    return tiny.learner(learner=UNCLIPPED | changes)


def deep() -> Learner:
    """A learner with local and global layers, two updates per batch, KL, warm-up and decay."""
    changes = {"lr": 2e-3, "updates_per_batch": 2, "kl_coef": 0.1}
    return tiny.learner(layers=4, learner=changes | {"schedule": "cosine", "warmup_steps": 3})


def ahead() -> Learner:
    """A learner whose rollouts may be sampled one step ahead, with their importance weights."""
    settings = UNCLIPPED | {"importance_cap": 1e3}
    return tiny.learner(learner=settings, plan={"placement": "split"}, rollout={"ahead": "one"})


def host(adapter: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in adapter.items()}


def start(learner: Learner, adapter: Mapping[str, Any] | None = None) -> Learner:
    """Sets an adapter; a copy, because updates donate it."""
    adapter = learner.policy.place_adapter(
        host(tiny.probe(layers=2) if adapter is None else adapter)
    )
    learner.state = dataclasses.replace(learner.state, adapter=adapter)
    return learner


def gradient(
    learner: Learner, rollouts: Sequence[Rollout] = ROLLOUTS
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The gradient of a first update, and its metrics."""
    metrics = learner.update(rollouts)
    return first_gradient(learner), metrics


def first_gradient(learner: Learner) -> dict[str, np.ndarray]:
    """The gradient of the first update, from Adam's first moment."""
    moment = optax.tree_utils.tree_get(learner.state.optimizer, "mu")
    return {name: np.asarray(value) / 0.1 for name, value in moment.items()}


def close(found: Mapping[str, Any], expected: Mapping[str, Any], *, bound: float) -> None:
    """Asserts equality within `bound`, relative to each array's largest entry."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(np.abs(value).max())
        assert scale > 0, name
        np.testing.assert_allclose(found[name], value, rtol=0, atol=bound * scale, err_msg=name)


def test_the_gradient_equals_that_of_the_reference_loss():
    # The learner drops rollouts with advantage 0; the reference computes them.
    whole, adapter = Whole.of(ROLLOUTS), tiny.probe(layers=2)
    value, _, expected = grpo(whole, adapter=adapter)
    learner = start(usual())
    found, metrics = gradient(learner)
    close(found, expected, bound=1e-5)
    np.testing.assert_allclose([metrics["loss"], metrics["policy_loss"]], value, rtol=1e-5)
    norm = np.sqrt(sum(np.sum(grad**2) for grad in expected.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert (metrics["clip_fraction"], metrics["ratio_max"]) == (0, 1)
    assert metrics["ratio_mean"] == pytest.approx(1)
    norms = lora.norms(learner.state.adapter, lora=tiny.LORA, layers=2)
    assert {name: metrics[name] for name in norms} == pytest.approx(
        {name: float(norm) for name, norm in norms.items()}
    )
    # Means over the learned tokens.
    kept = [rollout for rollout in ROLLOUTS if rollout.advantage]
    whole = Whole.of(kept)
    assert metrics["tokens_trained"] == whole.learned.sum()
    scores = np.asarray(log_softmax(adapter, tiny.base(layers=2), whole.tokens), np.float64)
    entropy = -np.sum(np.exp(scores) * np.maximum(scores, -1e9), axis=-1)[whole.learned].mean()
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
    gathered = np.take_along_axis(scores, whole.targets[..., None], -1)[..., 0][whole.learned]
    recorded = np.concatenate([rollout.completion.logprobs for rollout in kept])
    differences = np.abs(gathered - recorded)
    assert metrics["mismatch_mean"] == pytest.approx(differences.mean(), rel=1e-5)
    p999 = np.quantile(differences, 0.999)
    assert metrics["mismatch_p999"] == pytest.approx(p999, rel=1e-5)
    assert metrics["mismatch_max"] == pytest.approx(differences.max(), rel=1e-5)


def test_metrics_of_micro_batches_are_combined_by_hand():
    shares = [{"loss": 0.5, "entropy": 3.0, "ratio_max": 1.5}]
    shares += [{"loss": -1.5, "entropy": 1.0, "ratio_max": 1.25}]
    assert combined(shares, weight=8.0) == {"loss": -1.0, "entropy": 0.5, "ratio_max": 1.5}
    shares[1]["ratio_max"] = float("nan")
    assert np.isnan(combined(shares, weight=8.0)["ratio_max"])


def test_the_rate_is_that_of_the_schedule_unless_it_is_given():
    learner = start(usual())
    assert learner.update(ROLLOUTS)["lr"] == pytest.approx(1e-2)
    before = host(learner.state.adapter)
    assert learner.update(ROLLOUTS, rate=0.0)["lr"] == 0.0
    for name, value in learner.state.adapter.items():
        np.testing.assert_array_equal(value, before[name])


def test_sequence_weights_and_kl_equal_those_of_the_reference_loss():
    whole = Whole.of(ROLLOUTS)
    zeros = tiny.policy(layers=2).no_adapter()
    _, reference, _ = grpo(whole, mode="sequence", adapter=zeros)
    value, scores, expected = grpo(
        whole, mode="sequence", adapter=tiny.probe(layers=2), reference=reference, beta=0.5
    )
    found, metrics = gradient(start(usual(**WITH_KL)))
    close(found, expected, bound=1e-5)
    log_r = reference - scores
    kl = np.sum(whole.weights("sequence") * (np.exp(log_r) - log_r - 1))
    assert kl > 0.05
    np.testing.assert_allclose([metrics["loss"], metrics["kl"]], [value, kl], rtol=1e-4)
    # With a KL term every rollout has a loss, for any advantage.
    assert metrics["tokens_trained"] == sum(new for _, new in LENGTHS)


def test_without_a_signal_only_the_version_changes():
    learner = start(usual())
    before = host(learner.state.adapter)
    still = [dataclasses.replace(rollout, advantage=0.0) for rollout in ROLLOUTS]
    lost = [dataclasses.replace(rollout, reward=None) for rollout in ROLLOUTS]
    for rollouts in (still, lost, []):
        assert learner.update(rollouts) == dict.fromkeys({"tokens_trained", *PADDING}, 0.0)
    assert (learner.state.version, learner.state.updates) == (3, 0)
    for name, value in learner.state.adapter.items():
        np.testing.assert_array_equal(value, before[name])


def test_packing_splitting_blocks_and_remat_change_nothing(monkeypatch: pytest.MonkeyPatch):
    # Two rows, then a smaller batch.
    plan = {"row_tokens": 50, "micro_batch_tokens": 100, "remat": "none"}
    _, _, expected = grpo(Whole.of(ALL), adapter=tiny.probe(layers=2))
    _, metrics = gradient(start(usual()), ALL)
    monkeypatch.setattr("pipeline.compute.learner.programs.HEAD_TOKENS", 10)
    monkeypatch.setattr("pipeline.compute.learner.programs.HEAD_VOCAB", 40)
    learner = start(tiny.learner(learner=UNCLIPPED, plan=plan))
    assert [len(batch.tokens) for batch in learner._pack(ALL)] == [2, 1]
    found, others = gradient(learner, ALL)
    largest = max(float(np.abs(grad).max()) for grad in expected.values())
    for name, grad in expected.items():
        # Sums of float32 in another order.
        np.testing.assert_allclose(found[name], grad, rtol=0, atol=3e-6 * largest, err_msg=name)
    assert others.keys() == metrics.keys()
    for name in metrics.keys() - PADDING:
        assert others[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-6), name


def test_the_order_of_the_rollouts_changes_no_bit():
    expected, metrics = gradient(start(usual()))
    found, others = gradient(start(usual()), ROLLOUTS[3:] + ROLLOUTS[:3])
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    assert others == metrics


@pytest.mark.parametrize(("fsdp", "tp"), [(2, 2), slow(1, 1), slow(4, 2)])
def test_eight_devices_learn_the_same_as_one(fsdp: int, tp: int):
    expected, metrics = gradient(start(usual(**WITH_KL)))
    plan = {"learner_devices": 8, "slots": 8, "fsdp": fsdp, "tp": tp}
    plan |= {"micro_batch_tokens": 8 // tp * 42}
    learner = start(tiny.learner(learner=UNCLIPPED | WITH_KL, plan=plan))
    found, others = gradient(learner)
    close(found, expected, bound=1e-5)
    for name in metrics.keys() - PADDING:
        assert others[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-6), name
    # The adapter is replicated, the batch is sharded.
    for value in learner.state.adapter.values():
        assert len(value.sharding.device_set) == 8
        assert value.is_fully_replicated
    placed = learner._place(learner._pack(ROLLOUTS)[0])
    assert {shard.data.shape[0] for shard in placed.inputs.weights.addressable_shards} == {1}


def test_a_second_update_on_a_batch_uses_the_old_log_probs():
    whole = Whole.of(ROLLOUTS)
    once = start(usual())
    once.update(ROLLOUTS)
    moved = host(once.state.adapter)
    _, old, _ = grpo(whole, adapter=tiny.probe(layers=2))
    value, scores, _ = grpo(whole, adapter=moved, old=old)
    ratio = np.exp(scores - old)[whole.learned]
    assert np.abs(ratio - 1).max() > 0.2

    twice = start(usual(updates_per_batch=2))
    metrics = twice.update(ROLLOUTS)
    assert (twice.state.version, twice.state.updates) == (1, 2)
    # Metrics are those of the last update.
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-4)
    gain = ratio * np.repeat(whole.advantages, whole.learned.sum(axis=1))
    sign = np.sign(gain)
    clipped = (sign > 0) & (ratio > 1.2) | (sign < 0) & (ratio < 0.8)
    assert clipped.sum() > 0
    share = np.sum(clipped) / metrics["tokens_trained"]
    assert metrics["clip_fraction"] == pytest.approx(share, rel=1e-4)
    assert metrics["clip_low"] + metrics["clip_high"] == pytest.approx(share, rel=1e-4)
    # Over several micro-batches, without the rollouts that have no advantage.
    assert metrics["ratio_mean"] == pytest.approx(ratio[sign != 0].mean(), rel=1e-4)
    assert metrics["ratio_max"] == pytest.approx(ratio[sign != 0].max(), rel=1e-4)
    assert any((twice.state.adapter[name] != moved[name]).any() for name in moved)


def test_tokens_of_an_older_version_are_weighted_by_the_ratio_to_it():
    """The mismatch of the current version excludes them."""
    learner = start(ahead())
    older = learner.policy.place_adapter(tiny.make_probe(learner.policy, seed=4))
    learner.state = dataclasses.replace(learner.state, version=6)
    completions = [rollout.completion for rollout in ALL]
    now, then = (
        learner.score(completions, adapter=adapter) for adapter in (learner.state.adapter, older)
    )
    rollouts, ratios = [], []
    for rollout, new, old in zip(ALL, now, then, strict=True):
        half, tokens = len(new) // 2, rollout.completion.tokens
        segments = (
            Segment(tokens[:half], old[:half], version=5, adapter_sha256=""),
            Segment(tokens[half:], new[half:], version=6, adapter_sha256=""),
        )
        drawn = dataclasses.replace(rollout.completion, segments=segments)
        rollouts.append(dataclasses.replace(rollout, completion=drawn))
        ratios += [np.exp(new[:half] - old[:half]), np.ones(len(new) - half)]
    weights = np.concatenate(ratios)
    assert np.abs(weights - 1).max() > 0.1
    metrics = learner.update(rollouts)
    # Token weights: the mean over all tokens.
    assert metrics["importance_weight"] == pytest.approx(weights.mean(), rel=1e-4)
    assert metrics["mismatch_max"] < 1e-5


def test_scores_are_in_request_order_and_under_the_given_adapter():
    learner = usual()
    completions = [rollout.completion for rollout in ROLLOUTS]
    whole, other = Whole.of(ROLLOUTS), tiny.make_base(learner.policy, seed=1)
    for adapter, base in (
        (learner.policy.no_adapter(), tiny.base(layers=2)),
        (tiny.probe(layers=2), other),
    ):
        scores = np.asarray(log_softmax(adapter, base, whole.tokens))
        gathered = np.take_along_axis(scores, whole.targets[..., None], -1)[..., 0]
        found = learner.score(completions[::-1], adapter=adapter, base=base)
        for row, logprobs in enumerate(found[::-1]):
            expected = gathered[row, whole.learned[row]]
            np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)
    assert learner.score([], adapter=learner.policy.no_adapter()) == []


@pytest.mark.parametrize(
    ("plan", "bound"),
    [
        # Rings wrap several times, and slots are reused.
        ({}, 1e-4),
        # The rounding error of keys and values is 1/254 of their largest magnitude.
        ({"kv_cache": "int8"}, 0.1),
    ],
)
def test_promise_1_the_sampled_policy_is_the_learned_policy(plan: dict[str, Any], bound: float):
    adapter = tiny.probe()
    requests = tiny.make_requests([1, 14, 6, 9, 13, 2])
    drawn = tiny.engine(plan=plan).generate(
        requests, adapter=adapter, version=0, adapter_sha256="", temperature=TEMPERATURE
    )
    learner = deep()
    scored = learner.score(drawn, adapter=adapter)
    for completion, logprobs in zip(drawn, scored, strict=True):
        assert completion.logprobs.shape == logprobs.shape
        np.testing.assert_allclose(completion.logprobs, logprobs, rtol=0, atol=bound)
    # The adapter has an effect.
    without = learner.score(drawn, adapter=learner.policy.no_adapter())
    assert np.abs(np.concatenate(without) - np.concatenate(scored)).max() > 0.1


def test_promise_7_only_the_update_program_donates_the_state():
    """If the large program runs out of memory, no state is lost."""
    learner = start(usual())
    for program, donated in (
        (learner._compiled["score 1"], set()),
        (learner._compiled["gradient 1"], {2}),
        (learner._compiled["apply"], {0, 1}),
    ):
        arguments, _ = program.args_info
        for number, argument in enumerate(arguments):
            given = {leaf.donated for leaf in jax.tree.leaves(argument)}
            assert given == {number in donated}, number


GOLDEN = [
    -0.051289, -0.055847, -0.048574, -0.061242, -0.029936,
    -0.017023, -0.054590, -0.044152, -0.042688, -0.044387,
]  # fmt: skip


def test_ten_losses_equal_the_golden_ones():
    learner = start(deep(), tiny.probe())
    steps = (tiny.make_rollouts(LENGTHS, advantages=ADVANTAGES, seed=step) for step in range(10))
    losses = [learner.update(rollouts)["loss"] for rollouts in steps]
    np.testing.assert_allclose(losses, GOLDEN, rtol=0, atol=1e-4)


def test_promise_7_nothing_is_compiled_after_construction_and_there_is_one_base():
    policy = tiny.make_policy(
        dtype="bfloat16",
        lora=tiny.LORA.model_copy(update={"targets": "attention"}),
        num_hidden_layers=1,
        vocab_size=tiny.VOCAB + 1,
    )
    config = tiny.make_config(
        model={"dtype": "bfloat16"},
        learner={"updates_per_batch": 2, "kl_coef": 0.1, "schedule": "cosine", "warmup_steps": 3},
    )
    base = tiny.make_base(policy)
    jax.clear_caches()  # the programs that other tests have compiled
    learner = Learner(policy, base, config, tiny.VOCABULARY)
    completions = [rollout.completion for rollout in ROLLOUTS]
    with compilations() as seen:
        learner.update(ROLLOUTS)
        learner.update(ROLLOUTS[:2])
        learner.score(completions, adapter=learner.state.adapter)
        _ = learner.adapter_sha256
    assert seen == []
    embedding = base["embedder.input_embedding"]
    same = [array for array in jax.live_arrays() if array.shape == embedding.shape]
    pointers = {array.unsafe_buffer_pointer() for array in same}
    assert pointers == {embedding.unsafe_buffer_pointer()}
    leaves = jax.tree.leaves((learner.state.adapter, learner.state.optimizer))
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert len(floats) == 3 * len(learner.policy.adapter_shapes)
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}


def test_mismatch_of_the_previous_version_uses_its_own_adapter():
    """With `rollout.ahead` the current version has sampled none of the learned tokens."""
    learner = start(ahead())
    initial = learner.adapter_sha256
    completions = [rollout.completion for rollout in ALL]
    scored = learner.score(completions, adapter=learner.state.adapter)
    own = [
        dataclasses.replace(
            rollout, completion=changed(rollout.completion, logprobs=logprobs, version=0)
        )
        for rollout, logprobs in zip(ALL, scored, strict=True)
    ]
    assert learner.update(own)["mismatch_max"] < 1e-5
    assert learner.state.previous is not None
    assert lora.sha256(learner.state.previous) == initial != learner.adapter_sha256
    with compilations() as seen:
        metrics = learner.update(own)
    assert seen == []
    assert metrics["mismatch_max"] < 1e-5
    assert metrics["importance_weight"] != pytest.approx(1.0, abs=1e-4)


BAD = [float("nan"), float("inf"), 3e38]
"""Advantages with which loss or gradient overflow in float32."""


def leaves(learner: Learner) -> list[np.ndarray]:
    """The arrays that an update changes, on the host."""
    state = learner.state.on_host()
    changed: list[np.ndarray] = jax.tree.leaves((state.adapter, state.optimizer, state.reference))
    return changed


def test_an_update_that_is_not_finite_is_skipped():
    probe = tiny.probe()
    learner = start(deep(), probe)
    clean = [learner.update(ROLLOUTS) for _ in range(2)], leaves(learner)
    start(deep(), probe)
    first = learner.update(ROLLOUTS)
    before = leaves(learner)
    with compilations() as compiled:
        for version, advantage in enumerate(BAD, start=2):
            poisoned = dataclasses.replace(ROLLOUTS[0], advantage=advantage)
            metrics = learner.update([poisoned, *ROLLOUTS[1:]])
            assert metrics["skipped_updates"] == 1
            assert not np.isfinite([metrics["loss"], metrics["grad_norm"]]).all()
            assert metrics["tokens_trained"] == 0
            assert (learner.state.version, learner.state.updates) == (version, 2)
            for found, expected in zip(leaves(learner), before, strict=True):
                np.testing.assert_array_equal(found, expected)
    assert compiled == []
    # Skipped updates have no effect, also on the learning-rate schedule.
    assert [first, learner.update(ROLLOUTS)] == clean[0]
    for found, expected in zip(leaves(learner), clean[1], strict=True):
        np.testing.assert_array_equal(found, expected)
