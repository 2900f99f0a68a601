"""Special token ids of sampler and learner."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool

from configs.schema import Rollout
from pipeline.data.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Special token ids.

    Attributes:
        pad: the padding token.
        stops: stop tokens.
        forbidden: tokens that are never sampled, masked in sampler and learner.
        pieces: number of tokens; larger ids are padding rows of the embedding and forbidden, too;
            None: no padding rows.
    """

    pad: int
    stops: tuple[int, ...]
    forbidden: tuple[int, ...]
    pieces: int | None = None

    @staticmethod
    def of(tokenizer: Tokenizer, rollout: Rollout) -> Vocabulary:
        """Looks up the configured tokens.

        Raises:
            ValueError: if the tokenizer does not have one of them.
        """
        return Vocabulary(
            pad=tokenizer.pad_id,
            stops=tuple(tokenizer.piece_id(piece) for piece in rollout.stop_tokens),
            forbidden=tuple(tokenizer.piece_id(piece) for piece in rollout.forbidden_tokens),
            pieces=tokenizer.vocab_size,
        )

    def forbidden_mask(self, vocab_size: int) -> Bool[Array, " vocab"]:
        """True for tokens that cannot be sampled."""
        ids = jnp.arange(vocab_size)
        padding = ids >= (vocab_size if self.pieces is None else self.pieces)
        return padding.at[jnp.asarray(self.forbidden, int)].set(True)
