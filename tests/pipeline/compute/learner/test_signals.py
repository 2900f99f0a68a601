"""KL to the reference and distillation over whole distributions, end to end.

The tiny vocabulary has 93 allowed tokens, so k = 93 covers the whole distribution.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actors.learner_actor import LearnerActor
from launch.bench.harness import compilations
from pipeline.compute.learner.checkpoint import Checkpoints
from pipeline.compute.learner.learner import Learner
from pipeline.compute.model.adapter_file import write_adapter_file
from pipeline.compute.model.policy import Params
from tests import tiny
from tests.pipeline.compute.learner.reference import Whole, log_softmax
from tests.pipeline.compute.learner.test_learner import LENGTHS, UNCLIPPED, close, first_gradient
from tests.pipeline.compute.learner.test_learner import start as start_at

ALLOWED = tiny.VOCAB - len(tiny.VOCABULARY.forbidden)
STILL = tiny.make_rollouts(LENGTHS, advantages=[0.0] * 7)
WHOLE = Whole.of(STILL)


def probe(seed: int) -> dict[str, np.ndarray]:
    return jax.device_get(tiny.make_probe(tiny.policy(layers=2), seed=seed))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random adapter."""
    folder = tmp_path_factory.mktemp("teacher")
    write_adapter_file(folder, probe(3), version=7)
    return str(folder)


def start(learner: Learner) -> Learner:
    """Sets a nonzero adapter; the reference stays the base."""
    return start_at(learner, probe(1))


def taught(teacher: str) -> Learner:
    """A learner with reference and teacher over the whole vocabulary; a full and a small batch."""
    settings = {"kl": "topk", "kl_coef": 0.5, "kl_top_k": ALLOWED, "importance_cap": 0.02}
    settings |= {"teacher": teacher, "distill_coef": 0.25}
    plan = {"row_tokens": 50, "micro_batch_tokens": 100}
    return tiny.learner(learner=UNCLIPPED | settings, plan=plan)


def full_kl(first: jax.Array, second: jax.Array) -> jax.Array:
    """KL(first || second) over the whole vocabulary, mean over the learned tokens."""
    allowed = first > -1e9
    terms = jnp.where(allowed, jnp.exp(first) * jnp.where(allowed, first - second, 0.0), 0.0)
    return jnp.sum(terms.sum(axis=-1) * WHOLE.learned) / WHOLE.learned.sum()


def reference(
    policy: Params, initial: Params, teacher: Params
) -> tuple[tuple[float, float], dict[str, np.ndarray]]:
    """KL to the initial policy and from the teacher, and the gradient of the loss."""
    base = tiny.base(layers=2)

    @jax.jit
    def run(policy: Params) -> Any:
        def of(adapter: Params) -> jax.Array:
            return jnp.maximum(log_softmax(adapter, base, WHOLE.tokens), -1e10)

        def loss(policy: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            own = of(policy)
            kl, distilled = full_kl(own, of(initial)), full_kl(of(teacher), own)
            return 0.5 * kl + 0.25 * distilled, (kl, distilled)

        return jax.grad(loss, has_aux=True)(policy)

    grads, (kl, distilled) = run(policy)
    return (float(kl), float(distilled)), {name: np.asarray(grad) for name, grad in grads.items()}


def test_the_gradient_equals_that_of_the_reference_divergences(teacher: str):
    policy = tiny.policy(layers=2)
    here, zeros = policy.place_adapter(probe(1)), policy.no_adapter()
    (kl, distilled), grads = reference(here, zeros, policy.place_adapter(probe(3)))
    learner = start(taught(teacher))
    metrics = learner.update(STILL)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-4)
    assert metrics["distillation"] == pytest.approx(distilled, rel=1e-4)
    assert metrics["loss"] == pytest.approx(0.5 * kl + 0.25 * distilled, rel=1e-4)
    assert min(kl, distilled) > 0.01
    close(first_gradient(learner), grads, bound=2e-5)
    # The top k is the whole vocabulary, so no token is outside.
    assert metrics["top_mass_reference"] == pytest.approx(1, abs=1e-6)
    assert metrics["top_mass_policy"] == pytest.approx(1, abs=1e-6)
    assert metrics["sampled_outside"] == 0
    scores = np.asarray(log_softmax(zeros, tiny.base(layers=2), WHOLE.tokens))[WHOLE.learned]
    drawn = np.take_along_axis(scores, WHOLE.targets[WHOLE.learned][:, None], -1)
    assert metrics["sampled_rank"] == pytest.approx((scores > drawn).sum(axis=-1).mean())
    assert 0 < metrics["importance_weight"] < 0.02
    assert 0 < metrics["importance_capped"] < 1


def test_promise_7_batches_of_both_sizes_compile_nothing(teacher: str):
    learner = start(taught(teacher))
    with compilations() as seen:
        for lengths, sizes in (([(14, 28)] * 3, {2, 1}), ([(1, 2)], {1})):
            rollouts = tiny.make_rollouts(lengths, advantages=[1.0] * len(lengths))
            assert {len(batch.tokens) for batch in learner._pack(rollouts)} == sizes
            assert np.isfinite(learner.update(rollouts)["loss"])
    assert seen == []


def test_a_run_does_not_resume_with_another_teacher(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    learner = start(taught(teacher))
    actor = LearnerActor(learner._config)
    actor.learner, actor.checkpoints = learner, Checkpoints(tmp_path, keep=1)
    actor.save({"step": 1})
    assert actor.restore().meta == {"step": 1}
    moved_on = learner.policy.place_adapter(probe(4))
    monkeypatch.setattr(learner, "_teacher", moved_on)
    with pytest.raises(ValueError, match=r"learner\.teacher: .* has changed since this run"):
        actor.restore()
