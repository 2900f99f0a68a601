"""The program forms of sampler and learner on the chips, against the same computation on the CPU.

    chips, bfloat16 --.
    CPU, bfloat16     |-> tests.accelerator.compare
    CPU, float32    --'

A learner's results are compared directly. Sampled tokens may differ where two are almost equally
likely, and so do those that follow; so the log-probs that a sampler reports are compared with the
exact ones of its own tokens, and its tokens with the CPU's up to the first difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.compute.decode.engine import Engine
from pipeline.compute.decode.rollout_weights import RolloutWeights, rollout_policy
from pipeline.compute.learner.batches import TopKLogprobs
from pipeline.compute.learner.learner import Learner
from pipeline.data.packed_batch import TokenBatch
from pipeline.types import Completion
from tests.accelerator.compare import Arrays, Difference, difference, error_difference
from tests.accelerator.small_model import VOCABULARY, SmallModel, requests, rollouts


def log_probs(model: SmallModel) -> Arrays:
    """The log-probs of the rollouts' tokens, by the scoring program."""
    return {"log-probs": _scored(model, [rollout.completion for rollout in rollouts()])}


def _scored(model: SmallModel, completions: Sequence[Completion]) -> np.ndarray:
    """The log-probs of all tokens of completions."""
    with _default(model):
        found = model.scorer.score(completions, adapter=model.adapter, base=model.base)
    return np.concatenate(found)


@dataclass(frozen=True)
class Update:
    """What an update computes of the rollouts.

    Attributes:
        top_k: log-probs of the reference's most likely tokens, `positions vocab`.
        gradient: by parameter of the adapter.
    """

    top_k: Arrays
    gradient: Arrays


def update(model: SmallModel) -> Update:
    """The reference's top k and the gradient of the loss with its KL term, as in an update."""
    with _default(model):
        learner = Learner(model.policy, model.base, model.config, VOCABULARY)
        total, dense = jax.tree.map(jnp.zeros_like, model.adapter), []
        for batch in learner._pack(rollouts()):
            placed = learner._place(batch)
            assert placed.reference is not None
            dense.append(_dense(placed.reference, batch, vocab=model.policy.vocab_size))
            gradient = learner._compiled[f"gradient {len(batch.tokens)}"]
            total, _, _ = gradient(model.base, model.adapter, total, placed)
        return Update({"top k": np.concatenate(dense)}, jax.device_get(total))


def _dense(top: TopKLogprobs, batch: TokenBatch, *, vocab: int) -> np.ndarray:
    """Log-probs over the vocabulary at each learned position, `positions vocab`.

    Tokens outside of the top k have the smallest log-prob inside: two that are almost equally
    likely, of which one is inside, hardly change the result.
    """
    learned = batch.weights > 0
    logprobs = np.asarray(top.logprobs, np.float32)[learned]
    tokens = np.asarray(top.tokens)[learned]
    dense = np.repeat(logprobs.min(axis=-1, keepdims=True), vocab, axis=-1)
    np.put_along_axis(dense, tokens, logprobs, axis=-1)
    return dense


def sample(model: SmallModel) -> list[Completion]:
    """Completions by the decode programs, with more requests than slots."""
    longest = model.config.rollout.max_prompt_tokens
    with _default(model):
        policy = rollout_policy(model.policy, model.config)
        engine = Engine(policy, None, model.config, VOCABULARY)
        weights = RolloutWeights(model.policy, model.base, model.config)
        weights.load(model.adapter)
        return engine.generate(
            requests(longest),
            base=weights.base,
            adapter=weights.adapter,
            version=0,
            adapter_sha256="",
            temperature=1.0,
        )


def _default(model: SmallModel) -> Any:
    """Context in which operations without a mesh run on the model's devices."""
    return jax.default_device(model.policy.mesh.devices.flat[0])


@dataclass(frozen=True)
class Forms:
    """Computes each program form on the chips and on the CPU; `settings` of the configuration
    choose the form on the chips.

    Attributes:
        chips: the devices to check.
        cpu: a CPU device of the same process.
    """

    chips: Sequence[jax.Device]
    cpu: jax.Device

    def on_chips(self, **settings: Any) -> SmallModel:
        """The model on the chips, in bfloat16."""
        return SmallModel.on(self.chips, **settings)

    def on_cpu(self, dtype: str = "bfloat16", **settings: Any) -> SmallModel:
        """The model on the CPU."""
        return SmallModel.on([self.cpu], dtype=dtype, **settings)

    @cached_property
    def _exact(self) -> SmallModel:
        return self.on_cpu("float32")

    @cached_property
    def _log_probs(self) -> tuple[Arrays, Arrays]:
        """In bfloat16, in float32."""
        return log_probs(self.on_cpu()), log_probs(self._exact)

    @cached_property
    def _updates(self) -> tuple[Update, Update]:
        return update(self.on_cpu()), update(self._exact)

    @cached_property
    def _update(self) -> Update:
        return update(self.on_chips())

    def log_probs(self, **settings: Any) -> Difference:
        """The scoring program, sharded by row."""
        rounded, exact = self._log_probs
        return difference(log_probs(self.on_chips(**settings)), rounded=rounded, exact=exact)

    def soft_caps(self) -> Difference:
        """The scoring program of Gemma 2, with soft-capped attention and logits."""
        return difference(
            log_probs(self.on_chips(gemma2=True)),
            rounded=log_probs(self.on_cpu(gemma2=True)),
            exact=log_probs(self.on_cpu("float32", gemma2=True)),
        )

    def top_k(self) -> Difference:
        """The reference's top k."""
        rounded, exact = self._updates
        return difference(self._update.top_k, rounded=rounded.top_k, exact=exact.top_k)

    def gradient(self, **settings: Any) -> Difference:
        """The gradient of an update."""
        found = update(self.on_chips(**settings)) if settings else self._update
        rounded, exact = self._updates
        return difference(found.gradient, rounded=rounded.gradient, exact=exact.gradient)

    def decode(self, **settings: Any) -> tuple[Difference, float]:
        """Prefill, slots, caches and sampling.

        Returns:
            The difference of the reported log-probs from the exact ones of the same tokens, and the
            share of tokens that equal the CPU's, up to the first difference of each rollout.
        """
        found, usual = sample(self.on_chips(**settings)), sample(self.on_cpu(**settings))
        compared = error_difference(
            self._errors(found), allowed=self._errors(usual), name="log-probs"
        )
        return compared, _same_tokens(found, usual)

    def _errors(self, completions: Sequence[Completion]) -> np.ndarray:
        """Reported log-probs less the exact ones of the same tokens."""
        reported = np.concatenate([completion.logprobs for completion in completions])
        return reported - _scored(self._exact, completions)


def _same_tokens(found: Sequence[Completion], usual: Sequence[Completion]) -> float:
    """Share of the tokens before the first different one of each completion."""
    same = [
        np.logical_and.accumulate(one.tokens == other.tokens)
        for one, other in zip(found, usual, strict=True)
    ]
    return float(np.concatenate(same).mean())
