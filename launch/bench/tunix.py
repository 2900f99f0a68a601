"""The peer: Tunix 0.1.7's own GRPO loss and sampler on its own Gemma 3, with qwix LoRA.

Its remat is not used: it raises `TraceContextError` with its flax version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.gemma3 import model as gemma3
from tunix.rl import algo_core
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample

from configs.schema import Lora
from pipeline.compute.model.vocabulary import Vocabulary

TARGETS = r".*layers.*(q_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)"
"""Modules with LoRA, the same as with our `lora.targets = "all"`."""

PAD, EOS = 0, 1


def with_lora(model: gemma3.Gemma3, lora: Lora, *, seed: int = 0) -> Any:
    """Its model with a LoRA of the same rank and scale as ours, by qwix."""
    provider = qwix.LoraProvider(module_path=TARGETS, rank=lora.rank, alpha=lora.scale * lora.rank)
    return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(seed), **model.get_model_input())


@dataclass(frozen=True)
class Peer:
    """Tunix's LoRA-wrapped Gemma 3 without its arrays: structure, and shapes of LoRA and base.

    The LoRA has the base's dtype, as in Tunix's recipes.
    """

    graphdef: Any
    lora: Any
    base: Any

    @staticmethod
    def create(config: gemma3.ModelConfig, lora: Lora) -> Peer:
        """Describes the model; allocates nothing."""
        bare = nnx.eval_shape(lambda: gemma3.Gemma3(config, rngs=nnx.Rngs(0)))
        model = nnx.eval_shape(lambda bare: with_lora(bare, lora), bare)
        return Peer(*nnx.split(model, nnx.LoRAParam, ...))

    def with_values(self, values: Mapping[str, jax.Array]) -> tuple[Any, Any]:
        """LoRA and base with values by path, each in its own dtype."""

        def filled(state: Any) -> Any:
            return nnx.from_flat_state(
                [
                    (path, leaf.replace(values[".".join(map(str, path))].astype(leaf.dtype)))
                    for path, leaf in nnx.to_flat_state(state)
                ]
            )

        return filled(self.lora), filled(self.base)

    def gradient(
        self,
        lora: Any,
        base: Any,
        example: TrainExample,
        *,
        temperature: float = 1.0,
        beta: float = 0.0,
    ) -> tuple[tuple[jax.Array, dict[str, Any]], Any]:
        """Value, metrics and LoRA gradient of its GRPO loss; `beta` weighs the KL term."""
        config = GRPOConfig(beta=beta, loss_agg_mode="token-mean")
        config.temperature = temperature  # as its GRPOLearner does

        def loss(model: Any, example: TrainExample) -> tuple[jax.Array, dict[str, Any]]:
            return algo_core.grpo_loss_fn(model, example, config, PAD, EOS)

        take = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam), has_aux=True)
        return take(nnx.merge(self.graphdef, lora, base), example)


def train_example(
    prompts: jax.Array,
    completions: jax.Array,
    advantages: jax.Array,
    reference: jax.Array | None = None,
) -> TrainExample:
    """A batch of token ids, `rows seq` each: prompts padded in front, completions behind.

    A loss with a KL term needs log-probs of the reference policy, shaped as the completions.
    """
    return TrainExample(
        prompt_ids=prompts,
        prompt_mask=prompts != PAD,
        completion_ids=completions,
        completion_mask=completions != PAD,
        advantages=advantages,
        ref_per_token_logps=reference,
        old_per_token_logps=None,
    )


class TunixSampler(Sampler):
    """Static batches of token ids through Tunix's own programs, compiled once per batch size.

    Its `__call__` makes a token buffer of the batch's maximum length, so both programs are compiled
    again for each length. Here the buffer always has the largest length, and the number of steps,
    an argument of its loop, is the batch's own.
    """

    def __init__(
        self, model: gemma3.Gemma3, vocabulary: Vocabulary, *, prompt: int, new: int
    ) -> None:
        self._forbidden, self._prompt, self._new = vocabulary.forbidden, prompt, new
        config = model.config
        cache = CacheConfig(
            cache_size=prompt + new,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        # The interface of a tokenizer; no text is read or written.
        token_ids = SimpleNamespace(
            pad_id=lambda: vocabulary.pad,
            eos_id=lambda: vocabulary.stops[0],
            bos_id=lambda: None,
            encode=None,
            decode=None,
        )
        super().__init__(model, token_ids, cache)
        self.eos_ids = jnp.array(vocabulary.stops)

    def sample(
        self, prompts: Sequence[np.ndarray], *, new: int, temperature: float, seed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs, `rows new`, of one static batch; temperature 0 is greedy."""
        rows = np.full((len(prompts), self._prompt), PAD, np.int32)
        for row, tokens in zip(rows, prompts, strict=True):
            row[-len(tokens) :] = tokens
        state = self.init_sample_state(
            jnp.array(rows),
            total_sampling_steps=self._prompt + self._new,
            include_logits=False,
            forbidden_token_ids=self._forbidden,
            temperature=temperature,
            top_p=1.0 if temperature else None,
            top_k=None,
            seed=jax.random.PRNGKey(seed),
            beam_size=None,
            include_logprobs=True,
        )
        state = replace(state, total_sampling_steps=self._prompt + new)
        weights = self._flattened_transformer_state
        state = self._compiled_decode_fn(
            weights, self._compiled_prefill_fn(weights, state, None, echo=False)
        )
        generated = slice(self._prompt, self._prompt + new)
        buffers = jax.device_get((state.token_buffer, state.logprobs_buffer))
        return buffers[0][:, generated], buffers[1][:, generated]
