"""The recipe that Tunix 0.1.7 ships for GRPO of gemma3-1b on a v5e-8, with its own programs.

One prompt and two samples a step: its sampler decodes two rows to the end of the longer one, its
GRPO loss and gradient run on both at full length, Adam updates its LoRA. Its reference policy, its
data pipeline and the sync of the LoRA are left out, in its favour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.rl.grpo.grpo_learner import TrainExample

from configs.schema import Config
from launch.bench.rollout_case import NEW, PROMPT, VOCABULARY
from launch.bench.tunix_peer import Peer
from launch.bench.tunix_sampler import TunixSampler
from pipeline.compute.model.policy import Params, Policy
from pipeline.contracts.rollouts import RolloutRequest

SAMPLES = 2
"""Rollouts of a step, all of one prompt."""


@dataclass
class Recipe:
    """Tunix's sampler, gradient and update on the same weights, compiled once.

    Attributes:
        sampler: Tunix's sampler.
        update: gradient and Adam update: new LoRA and optimizer state from LoRA, optimizer state,
            base and a batch.
        lora: trained parameters.
        optimizer: Adam's state.
        base: frozen parameters.
    """

    sampler: TunixSampler
    update: Any
    lora: Any
    optimizer: Any
    base: Any

    @staticmethod
    def make(policy: Policy, base: Params, adapter: Params, config: Config) -> Recipe:
        """Compiles the recipe for these weights."""
        lora = config.lora
        peer = Peer.create(policy.architecture.config, rank=lora.rank, alpha=lora.scale * lora.rank)
        values = peer.with_values({**base, **adapter})
        adam = optax.adam(config.learner.lr)

        def update(lora: Any, state: Any, base: Any, example: TrainExample) -> tuple[Any, Any]:
            _, gradient = peer.gradient(lora, base, example)
            updates, state = adam.update(gradient, state, lora)
            return optax.apply_updates(lora, updates), state

        sampler = TunixSampler(
            nnx.merge(peer.graphdef, *values), VOCABULARY, prompt=PROMPT, new=NEW
        )
        return Recipe(sampler, jax.jit(update), values[0], adam.init(values[0]), values[1])

    def run(self, requests: Sequence[RolloutRequest]) -> int:
        """Trains on these rollouts, step by step; returns the number of trained tokens."""
        trained = 0
        for first in range(0, len(requests), SAMPLES):
            rows = requests[first : first + SAMPLES]
            lengths = [request.max_new_tokens or NEW for request in rows]
            prompts = [request.prompt_tokens for request in rows]
            tokens, _ = self.sampler.sample(prompts, new=max(lengths), temperature=1.0, seed=first)
            example = _example(prompts, tokens, lengths)
            self.lora, self.optimizer = jax.block_until_ready(
                self.update(self.lora, self.optimizer, self.base, example)
            )
            trained += sum(lengths)
        return trained


def _example(
    prompts: Sequence[np.ndarray], tokens: np.ndarray, lengths: Sequence[int]
) -> TrainExample:
    """Returns both rollouts at full length: prompts padded in front, completions at the end."""
    ids = np.full((SAMPLES, PROMPT), VOCABULARY.pad, np.int32)
    completions = np.full((SAMPLES, NEW), VOCABULARY.pad, np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :] = prompt
        completions[row, : lengths[row]] = tokens[row, : lengths[row]]
    return TrainExample(
        prompt_ids=jnp.asarray(ids),
        prompt_mask=jnp.asarray(ids != VOCABULARY.pad),
        completion_ids=jnp.asarray(completions),
        completion_mask=jnp.asarray(np.arange(NEW) < np.array(lengths)[:, None]),
        advantages=jnp.asarray([1.0, -1.0], jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )
