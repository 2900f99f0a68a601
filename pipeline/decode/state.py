"""What a sampler's programs are given and pass on: temperature, slots, and who is let into them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pipeline.decode.cache import Caches


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
        kept_logprobs: renormalised over what could be drawn; None: nothing is cut away.
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
    kept_logprobs: Float[Array, "slots new"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Newcomers:
    """Rollouts that slots are given to. Everything is by slot, but the first three.

    Attributes:
        count: of newcomers on each device.
        slots: `count` slots of each device, numbered on it, that caches are copied to.
        rows: the row of their prompt among those that the device has read.
        arrived: slots that are given to a newcomer; elsewhere the following mean nothing.
        last: the last token that was read.
        length: tokens that were read before that.
        begun: of these the tokens that are not the prompt's; drawing goes on behind them.
        limit: see `DecodeState`.
        keys: likewise.
    """

    count: Int[Array, " shards"]
    slots: Int[Array, " slots"]
    rows: Int[Array, " slots"]
    arrived: Bool[Array, " slots"]
    last: Int[Array, " slots"]
    length: Int[Array, " slots"]
    begun: Int[Array, " slots"]
    limit: Int[Array, " slots"]
    keys: UInt32[Array, "slots 2"]
