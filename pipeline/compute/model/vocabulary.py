"""Token ids with a meaning to sampler and learner."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool

from configs.schema import Rollout
from pipeline.inputs.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Which ids are special.

    Attributes:
        pad: fills what is not a token.
        stops: end a completion.
        forbidden: may never be drawn, and have no probability on either side.
        pieces: ids from here on stand for nothing, rows that only pad the embedding, and are
            forbidden, too; None: there are none.
    """

    pad: int
    stops: tuple[int, ...]
    forbidden: tuple[int, ...]
    pieces: int | None = None

    @staticmethod
    def of(tokenizer: Tokenizer, rollout: Rollout) -> Vocabulary:
        """Looks the configured pieces up.

        Raises:
            ValueError: if the tokenizer has no such piece.
        """
        return Vocabulary(
            pad=tokenizer.pad_id,
            stops=tuple(tokenizer.piece_id(piece) for piece in rollout.stop_tokens),
            forbidden=tuple(tokenizer.piece_id(piece) for piece in rollout.forbidden_tokens),
            pieces=tokenizer.vocab_size,
        )

    def forbidden_mask(self, vocab_size: int) -> Bool[Array, " vocab"]:
        """True where a token may not be drawn."""
        ids = jnp.arange(vocab_size)
        padding = ids >= (vocab_size if self.pieces is None else self.pieces)
        return padding.at[jnp.asarray(self.forbidden, int)].set(True)
