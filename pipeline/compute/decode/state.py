"""Arguments and state of the sampler's programs: sampling parameters, slots, slot admissions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pipeline.compute.decode.cache import Caches

A = TypeVar("A", np.ndarray, jax.Array)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingParams:
    """Sampling temperature as program arguments, so that greedy decoding needs no other program.

    Attributes:
        temperature: divides the logits; log-probs are those of the scaled distribution.
        noise: scale of the Gumbel noise: 1.0 samples, 0.0 takes the most likely token.
    """

    temperature: Float[Array, ""]
    noise: Float[Array, ""]

    @staticmethod
    def of(temperature: float) -> SamplingParams:
        """Parameters for a temperature; 0 means greedy, with log-probs at temperature 1."""
        scaled, noise = (temperature, 1.0) if temperature > 0 else (1.0, 0.0)
        # Through NumPy: `jnp.float32(x)` would compile a conversion.
        return SamplingParams(*jax.device_put((np.float32(scaled), np.float32(noise))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """State of all slots.

    Attributes:
        caches: one ring cache per layer that has keys and values.
        last: each slot's newest token, not yet in the caches.
        length: positions in each slot's caches, equal to the position of `last`.
        count: completion tokens so far, those of the request's `partial` included.
        limit: maximum of `count`.
        done: slots whose rollout has ended, and empty slots; their tokens are meaningless. The
            host may know of more ended rollouts.
        keys: RNG key of each rollout.
        tokens: sampled tokens; the padding token after the end of a rollout, and in the places of
            the tokens of `partial`, which stay on the host.
        logprobs: log-probs of `tokens` under the full distribution.
        processed_logprobs: log-probs renormalised over the tokens that could be sampled; None if
            the distribution is not truncated.
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


class SlotAdmissions(NamedTuple, Generic[A]):
    """Rollouts that are admitted to slots: columns of an int32 table with one row per slot.

    One table, filled on the host and read on the device: transferring a small array per column
    takes the host longer than a short segment takes the device.

    Attributes:
        slots: slots of each device that caches are copied to, numbered per device; the first
            entries of each device, one per admission on it; later entries are unused.
        rows: row of the prompt in the device's prefilled batch, for each entry of `slots`.
        admitted: 1 where the slot receives a new rollout; the columns below are unused elsewhere.
        last: the last token of the prefilled sequence.
        length: number of tokens before `last`.
        num_partial: completion tokens among the prefilled ones; sampling continues after them.
        limit: `DecodeState.limit`.
        keys: `DecodeState.keys`, bit-cast to int32: `slots 2`.
    """

    slots: A
    rows: A
    admitted: A
    last: A
    length: A
    num_partial: A
    limit: A
    keys: A

    @staticmethod
    def empty_table(slots: int) -> np.ndarray:
        """A table without admissions, on the host."""
        return np.zeros((slots, 9), np.int32)

    @staticmethod
    def of(table: A) -> SlotAdmissions[A]:
        """The columns of a table; on the host views that can be written."""
        return SlotAdmissions._make([*(table[:, n] for n in range(7)), table[:, 7:]])
