"""What a sampler's programs are given and pass on: temperature, slots, and who is let into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pipeline.compute.decode.cache import Caches

A = TypeVar("A", np.ndarray, jax.Array)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heat:
    """Sampling temperature as the programs take it, so that greedy needs no program of its own.

    Attributes:
        temperature: divides the logits; log-probs are those of the scaled distribution.
        noise: 1.0 draws, 0.0 takes the likeliest token.
    """

    temperature: Float[Array, ""]
    noise: Float[Array, ""]

    @staticmethod
    def of(temperature: float) -> Heat:
        """Temperature 0 means greedy; its log-probs are those at temperature 1."""
        scaled, noise = (temperature, 1.0) if temperature > 0 else (1.0, 0.0)
        # Through NumPy: `jnp.float32(x)` would compile a conversion.
        return Heat(*jax.device_put((np.float32(scaled), np.float32(noise))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The slots.

    Attributes:
        caches: one ring cache a layer.
        last: each slot's newest token, not yet in the caches.
        length: positions in each slot's caches, which is the position of `last`.
        count: tokens drawn so far, those included that were drawn before it was cut.
        limit: tokens after which a rollout ends at the latest.
        done: slots whose rollout has ended, or that never had one; what they draw means nothing.
            The host may know of more.
        keys: each rollout's random key.
        tokens: drawn tokens; the padding token behind a rollout's end, and in the places of what
            was drawn before it was cut: that stays with the host.
        logprobs: their log-probs under the full distribution.
        processed_logprobs: renormalised over what could be drawn; None: nothing is cut away.
    """

    caches: Caches
    last: Int[Array, " slots"]
    length: Int[Array, " slots"]
    count: Int[Array, " slots"]
    limit: Int[Array, " slots"]
    done: Bool[Array, " slots"]
    keys: UInt32[Array, "slots 2"]
    tokens: Int[Array, "slots new"]
    logprobs: Float[Array, "slots new"]
    processed_logprobs: Float[Array, "slots new"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Newcomers(Generic[A]):
    """Rollouts that slots are given to, one row a slot.

    One table, filled on the host and read on the device: handing over a small array for each
    column takes the host longer than a short segment takes the device.

    Attributes:
        table: int32 `slots 9`; its columns are the properties below.
    """

    table: A

    @staticmethod
    def none(slots: int) -> Newcomers[np.ndarray]:
        """Nobody has arrived, on the host."""
        return Newcomers(np.zeros((slots, 9), np.int32))

    @property
    def slots(self) -> A:
        """Slots of each device that caches are copied to, numbered on it.

        As many as have arrived on it, in front; what follows them means nothing.
        """
        return self.table[:, 0]

    @property
    def rows(self) -> A:
        """For each of these slots the row of its prompt among those that the device has read."""
        return self.table[:, 1]

    @property
    def arrived(self) -> A:
        """1: the slot is given to a newcomer; elsewhere the following mean nothing."""
        return self.table[:, 2]

    @property
    def last(self) -> A:
        """The last token that was read."""
        return self.table[:, 3]

    @property
    def length(self) -> A:
        """Tokens that were read before that."""
        return self.table[:, 4]

    @property
    def begun(self) -> A:
        """Of these the tokens that are not the prompt's; drawing goes on behind them."""
        return self.table[:, 5]

    @property
    def limit(self) -> A:
        """See `DecodeState`."""
        return self.table[:, 6]

    @property
    def keys(self) -> A:
        """`slots 2`: likewise, bit for bit."""
        return self.table[:, 7:]
