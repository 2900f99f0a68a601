"""The peer: Tunix 0.1.7's own sampler on its own Gemma 3, compiled once per batch size.

Its `__call__` makes a token buffer of the batch's maximum length, so both programs are compiled
again for each length. Here the buffer always has the largest length, and the number of steps, an
argument of its loop, is the batch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.gemma3.model import Gemma3

from pipeline.compute.model.vocabulary import Vocabulary


class TunixSampler(Sampler):
    """Static batches of token ids through Tunix's own programs.

    Args:
        model: with or without LoRA.
        vocabulary: its padding, stop and forbidden tokens.
        prompt: tokens of a prompt, padding in front included.
        new: largest number of generated tokens.
    """

    def __init__(self, model: Gemma3, vocabulary: Vocabulary, *, prompt: int, new: int) -> None:
        self._vocabulary, self._prompt, self._new = vocabulary, prompt, new
        config = model.config
        cache = CacheConfig(
            cache_size=prompt + new,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        super().__init__(model, _Ids(vocabulary), cache)
        self.eos_ids = jnp.array(vocabulary.stops)

    def sample(
        self, prompts: Sequence[np.ndarray], *, new: int, temperature: float, seed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and log-probs, `rows new`, of one static batch.

        Args:
            prompts: one per row; a group's prompt is repeated for each of its rollouts.
            new: tokens of the longest row; all rows are computed to that length.
            temperature: 0 is greedy, with the log-probs of temperature 1.
            seed: of its RNG.
        """
        state = self._begin(prompts, temperature=temperature, seed=seed)
        state = replace(state, total_sampling_steps=self._prompt + new)
        weights = self._flattened_transformer_state
        state = self._compiled_decode_fn(
            weights, self._compiled_prefill_fn(weights, state, None, echo=False)
        )
        generated = slice(self._prompt, self._prompt + new)
        buffers = jax.device_get((state.token_buffer, state.logprobs_buffer))
        return buffers[0][:, generated], buffers[1][:, generated]

    def trace_decode(self, rows: int, place: Sharding) -> jax.stages.Traced:
        """Traces its decode program for `rows` rows; needs only the model's shapes."""
        one = self._begin([np.ones(1, np.int32)], temperature=1.0, seed=0)

        def widened(x: Any) -> Any:
            if not isinstance(x, jax.Array):
                return x
            shape = (rows, *x.shape[1:]) if x.shape[:1] == (1,) else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=place)

        return self._compiled_decode_fn.trace(
            self._flattened_transformer_state, jax.tree.map(widened, one)
        )

    def _begin(self, prompts: Sequence[np.ndarray], *, temperature: float, seed: int) -> Any:
        """Returns its state before prefill."""
        rows = np.full((len(prompts), self._prompt), self._vocabulary.pad, np.int32)
        for row, tokens in zip(rows, prompts, strict=True):
            row[-len(tokens) :] = tokens
        return self.init_sample_state(
            jnp.array(rows),
            total_sampling_steps=self._prompt + self._new,
            include_logits=False,
            forbidden_token_ids=self._vocabulary.forbidden,
            temperature=temperature,
            top_p=1.0 if temperature else None,
            top_k=None,
            seed=jax.random.PRNGKey(seed),
            beam_size=None,
            include_logprobs=True,
        )


class _Ids:
    """The tokenizer interface of the sampler, for token ids without text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def pad_id(self) -> int:
        return self._vocabulary.pad

    def eos_id(self) -> int:
        return self._vocabulary.stops[0]

    def bos_id(self) -> None:
        return None

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError(text)

    def decode(self, ids: list[int]) -> str:
        raise NotImplementedError(ids)
