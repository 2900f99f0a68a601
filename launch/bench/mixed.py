"""Counts compilations of the demo's learner in steps of very different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

import configs
from configs.load import load_config
from launch.bench.counting import compilations
from pipeline.compute.learner.learner import Learner
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.compute.opening import open_policy
from pipeline.contracts.rollouts import Completion, Rollout, RolloutName

_ROOT = Path(configs.__file__).parents[1]
_FIRST_ID = 8
"""Smaller ids are special tokens of the demo's tokenizer."""


def updates(*, steps: int) -> dict[str, Any]:
    """Counts compilations in `steps` updates of 1 to 96 rollouts of 2 to 88 tokens, after a first.

    The demo's learner with a KL term over the reference's top k and two updates a step, so that all
    programs are used: old log-probs, reference top k, full and small micro-batches.
    """
    overrides = [
        ("plan.learner_devices", "1"),
        ("learner.kl_coef", "0.1"),
        ("learner.kl", "topk"),
        ("learner.kl_top_k", "32"),
        ("learner.updates_per_batch", "2"),
    ]
    config = load_config(_ROOT / "configs" / "demo.toml", overrides)
    policy, base = open_policy(
        _ROOT / config.model.path,
        dtype=config.model.dtype,
        lora=config.lora,
        mesh=make_mesh(jax.devices()[:1]),
    )
    vocabulary = Vocabulary(pad=0, stops=(1,), forbidden=(0,))
    learner = Learner(policy, base, config, vocabulary)
    rng = np.random.default_rng(0)
    limits = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens

    def update(step: int, count: int) -> float:
        rollouts = [
            _rollout(rng, step, number, limits, entries=policy.vocab_size)
            for number in range(count)
        ]
        return learner.update(rollouts)["tokens_trained"]

    update(0, 96)
    counts = rng.integers(1, 97, size=steps)
    with compilations() as compiled:
        tokens = sum(update(step, int(count)) for step, count in enumerate(counts, start=1))
    return {
        "steps": steps,
        "rollouts": int(counts.sum()),
        "tokens": int(tokens),
        "compiled": len(compiled),
    }


def _rollout(
    rng: np.random.Generator, step: int, number: int, limits: tuple[int, int], *, entries: int
) -> Rollout:
    prompt, new = (int(rng.integers(1, most + 1)) for most in limits)
    completion = Completion(
        name=RolloutName("train", step, prompt_id=number, sample=0),
        prompt_tokens=rng.integers(_FIRST_ID, entries, prompt).astype(np.int32),
        tokens=rng.integers(_FIRST_ID, entries, new).astype(np.int32),
        logprobs=-rng.random(new).astype(np.float32),
        stop_reason="eos",
        version=0,
        adapter_sha256="",
    )
    return Rollout(completion, "", {}, 0.0, float(rng.standard_normal()))
