"""The program forms of sampler and learner on the chips, against the same computation on the CPU.

    chips, bfloat16 --.
    CPU, bfloat16     |-> tests.accelerator.compare
    CPU, float32    --'

A learner's results are compared directly. Sampled tokens may differ where two are almost equally
likely, and so do those that follow; so the log-probs that a sampler reports are compared with the
exact ones of its own tokens, and its tokens with the CPU's up to the first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.compute.decode.engine import Engine
from pipeline.compute.decode.rollout_weights import RolloutWeights, rollout_policy
from pipeline.compute.learner.batches import TopKLogprobs
from pipeline.compute.learner.learner import Learner
from pipeline.compute.learner.scorer import Scorer
from pipeline.data.packed_batch import TokenBatch
from pipeline.types import Completion
from tests.accelerator.compare import Arrays, Difference, difference, error_difference
from tests.accelerator.small_model import VOCABULARY, SmallModel, requests, rollouts


def log_probs(model: SmallModel) -> Arrays:
    """The log-probs of the rollouts' tokens, by the scoring program."""
    completions = [rollout.completion for rollout in rollouts()]
    return {"log-probs": _scored(model, scorer(model), completions)}


def scorer(model: SmallModel) -> Scorer:
    """The scoring program."""
    with _default(model):
        return Scorer(model.policy, model.config, VOCABULARY)


def _scored(model: SmallModel, program: Scorer, completions: Sequence[Completion]) -> np.ndarray:
    """The log-probs of all tokens of completions."""
    with _default(model):
        found = program.score(completions, adapter=model.adapter, base=model.base)
    return np.concatenate(found)


def update(model: SmallModel) -> Arrays:
    """As in an update, the log-probs of the reference's top k as "top k", `positions vocab`, and
    by parameter of the adapter the gradient of the loss with its KL term."""
    with _default(model):
        learner = Learner(model.policy, model.base, model.config, VOCABULARY)
        learner.state = replace(learner.state, adapter=model.adapter)
        total, dense = jax.tree.map(jnp.zeros_like, model.adapter), []
        for batch in learner._pack(rollouts()):
            placed = learner._place(batch)
            assert placed.reference is not None
            dense.append(_dense(placed.reference, batch, vocab=model.policy.vocab_size))
            gradient = learner._compiled[f"gradient {len(batch.tokens)}"]
            total, _, _ = gradient(model.base, model.adapter, total, placed)
        return {"top k": np.concatenate(dense), **jax.device_get(total)}


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


@cache
def _computed(
    form: Callable[[SmallModel], Arrays], devices: tuple[jax.Device, ...], **settings: Any
) -> Arrays:
    return form(SmallModel.on(devices, **settings))


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

    def _compare(
        self,
        form: Callable[[SmallModel], Arrays],
        *,
        of: Callable[[str], bool] = bool,
        gemma2: bool = False,
        **settings: Any,
    ) -> Difference:
        """The difference of the results of whose names `of` is true."""
        results = [
            _computed(form, tuple(self.chips), gemma2=gemma2, **settings),
            _computed(form, (self.cpu,), gemma2=gemma2),
            _computed(form, (self.cpu,), gemma2=gemma2, dtype="float32"),
        ]
        chips, rounded, exact = ({name: x[name] for name in x if of(name)} for x in results)
        return difference(chips, rounded=rounded, exact=exact)

    def log_probs(self, **settings: Any) -> Difference:
        """The scoring program, sharded by row; with `gemma2` attention and logits are capped."""
        return self._compare(log_probs, **settings)

    def top_k(self) -> Difference:
        """The reference's top k."""
        return self._compare(update, of=lambda name: name == "top k")

    def gradient(self, **settings: Any) -> Difference:
        """The gradient of an update."""
        return self._compare(update, of=lambda name: name != "top k", **settings)

    def decode(self, **settings: Any) -> tuple[Difference, float]:
        """Prefill, slots, caches and sampling.

        Returns:
            The difference of the reported log-probs from the exact ones of the same tokens, and the
            share of tokens that equal the CPU's, up to the first difference of each rollout.
        """
        found, usual = (
            sample(SmallModel.on(devices, **settings)) for devices in (self.chips, [self.cpu])
        )
        compared = error_difference(
            self._errors(found), allowed=self._errors(usual), name="log-probs"
        )
        return compared, _same_tokens(found, usual)

    @cached_property
    def _exact(self) -> tuple[SmallModel, Scorer]:
        model = SmallModel.on([self.cpu], dtype="float32")
        return model, scorer(model)

    def _errors(self, completions: Sequence[Completion]) -> np.ndarray:
        """Reported log-probs less the exact ones of the same tokens."""
        reported = np.concatenate([completion.logprobs for completion in completions])
        return reported - _scored(*self._exact, completions)


def _same_tokens(found: Sequence[Completion], usual: Sequence[Completion]) -> float:
    """Share of the tokens before the first different one of each completion."""
    same = [
        np.logical_and.accumulate(one.tokens == other.tokens)
        for one, other in zip(found, usual, strict=True)
    ]
    return float(np.concatenate(same).mean())
