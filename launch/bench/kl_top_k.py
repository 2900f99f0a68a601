"""How much of the KL divergence its top k keeps, as a function of `learner.kl_top_k`.

The estimator merges all tokens outside of the reference's top k into one bucket (learner/topk.py).
Compared with the whole vocabulary: its value, a lower bound, and its gradient by the policy's
logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.bench.harness import Bound, Row, Section
from launch.bench.small_gemma import preset
from launch.bench.top_k import VOCAB, WIDTH
from pipeline.compute.decode.engine import Engine
from pipeline.compute.learner.topk import reverse_kl, top_k_logprobs
from pipeline.compute.model.head import scaled_logits
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.top_k import TopK
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.compute.opening import open_policy
from pipeline.data.load import load_data
from pipeline.data.text.tokenizer_files import read_tokenizer
from pipeline.evaluate.evaluation import requests

KS = (1, 4, 8, 16, 32, 64, 128, 256)
POSITIONS = 64
"""Of a random head."""


def errors(policy: jax.Array, reference: jax.Array) -> dict[str, Any]:
    """Returns the KL, and by k the lost shares of its value and of its gradient (Euclidean norm).

    Args:
        policy: its logits, `positions vocab`.
        reference: its logits.
    """
    exact = jax.nn.log_softmax(reference)
    vocab = exact.shape[-1]

    def whole(policy: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(policy)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - exact)) / len(policy)

    def of_top(policy: jax.Array, k: int) -> jax.Array:
        top = TopK(*jax.lax.top_k(exact, k))
        own = jnp.take_along_axis(jax.nn.log_softmax(policy), top.tokens, axis=-1)
        kept = top_k_logprobs(TopK(top.logprobs[None], top.tokens[None]), dtype=jnp.float32)
        return jnp.mean(reverse_kl(own[None], kept))

    value, gradient = jax.value_and_grad(whole)(policy)
    found = {"kl": float(value)}
    for k in (k for k in KS if k < vocab):
        kl, own = jax.value_and_grad(of_top)(policy, k)
        found[f"value_{k}"] = float(1 - kl / value)
        found[f"gradient_{k}"] = float(jnp.linalg.norm(own - gradient) / jnp.linalg.norm(gradient))
    return found


def random_head(*, spread: float) -> dict[str, Any]:
    """Returns the errors for random heads of 262,144 entries.

    Args:
        spread: standard deviation of the logits; a larger one gives the top k more mass.
    """
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((POSITIONS, WIDTH), np.float32)
    changed = hidden + 0.1 * rng.standard_normal(hidden.shape, np.float32)
    rows = rng.standard_normal((VOCAB, WIDTH), np.float32) * np.float32(spread / WIDTH**0.5)
    return errors(jnp.asarray(changed @ rows.T), jnp.asarray(hidden @ rows.T))


def demo_model(*, prompts: int, scale: float) -> dict[str, Any]:
    """Returns the errors at the completions that the demo's base samples.

    Args:
        prompts: number of test prompts.
        scale: of a random adapter, the policy; the reference is the base.
    """
    config = preset("demo")
    folder = Path(config.model.path)
    tokenizer, mesh = read_tokenizer(folder), make_mesh(jax.devices()[:1])
    policy, base = open_policy(folder, dtype=config.model.dtype, lora=config.lora, mesh=mesh)
    vocabulary = Vocabulary.of(tokenizer, config.rollout)
    engine = Engine(policy, base, config, vocabulary, text_of=tokenizer.decode)
    chosen = load_data(config, tokenizer).test.prompts[:prompts]
    completions = engine.generate(
        requests(chosen, phase="test"),
        adapter=policy.no_adapter(),
        version=0,
        adapter_sha256="",
        temperature=config.rollout.temperature,
    )
    tokens = np.zeros((len(completions), config.rollout.max_tokens), np.int32)
    learned = np.zeros(tokens.shape, bool)
    for row, one in enumerate(completions):
        whole = np.concatenate([one.prompt_tokens, one.tokens])
        tokens[row, : len(whole)] = whole
        learned[row, len(one.prompt_tokens) - 1 : len(whole) - 1] = True
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)

    def logits(adapter: Any) -> jax.Array:
        hidden, _ = policy.bind(base, adapter)(jnp.asarray(tokens), jnp.asarray(places))
        return scaled_logits(
            hidden[learned],
            policy.embedding(base),
            softcap=None,
            temperature=config.rollout.temperature,
            forbidden=vocabulary.forbidden_mask(policy.vocab_size),
        )

    probe = {name: scale * value for name, value in policy.probe_adapter(0).items()}
    return errors(logits(probe), logits(policy.no_adapter()))


KL = Section(
    "kl",
    "The top-k KL against that of the whole vocabulary: the lost share of its value, and the "
    "distance of its gradient by the logits relative to the gradient's norm, by k",
    (
        Row("demo's model", demo_model, {"prompts": 100, "scale": 1.0}),
        *(
            Row(f"random head, spread {spread}", random_head, {"spread": spread})
            for spread in (3.0, 6.0)
        ),
    ),
    (Bound("value_64", least=0, most=0.05), Bound("value_128", most=0.05, optional=True)),
)
