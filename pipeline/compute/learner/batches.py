"""Micro-batches on the devices: what the compiled programs are given."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from pipeline.compute.model.sharding import by_row
from pipeline.contracts.batches import PackedBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """The top of a distribution at each position, and what is left.

    Attributes:
        logprobs: descending, normalised over the whole vocabulary; float32 or bfloat16.
        tokens: which tokens these are.
        tail: log of the mass of all other tokens, float32, taken before `logprobs` was rounded.
    """

    logprobs: Float[Array, "rows seq k"]
    tokens: Int[Array, "rows seq k"]
    tail: Float[Array, "rows seq"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What the model reads, and what it is asked about; see `PackedBatch`."""

    tokens: Int[Array, "rows seq"]
    targets: Int[Array, "rows seq"]
    segments: Int[Array, "rows seq"]
    positions: Int[Array, "rows seq"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DemonstrationBatch:
    """Worked examples on the devices, and the weight of each target in the loss."""

    inputs: Inputs
    weights: Float[Array, "rows seq"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceBatch:
    """A `TokenBatch` on the devices, with what other policies say of its tokens.

    Attributes:
        inputs: what the model reads.
        weights: of each target in the loss.
        advantages: of the rollout that each target belongs to.
        processed_logprobs: the sampler's, under the distribution that it drew from; None: there
            is no importance weight.
        old_logprobs: under the policy that drew; None or NaN: the current one is that policy. They
            come from the first update's own pass: another program rounds otherwise, by more than a
            narrow clip range bears.
        reference_logprobs: under the reference; None: its KL is not estimated from one token.
        reference: the reference's likeliest tokens; None: its KL is not estimated from those.
        teacher: the teacher's likeliest tokens; None: there is none.
    """

    inputs: Inputs
    weights: Float[Array, "rows seq"]
    advantages: Float[Array, "rows seq"]
    processed_logprobs: Float[Array, "rows seq"] | None = None
    old_logprobs: Float[Array, "rows seq"] | None = None
    reference_logprobs: Float[Array, "rows seq"] | None = None
    reference: Kept | None = None
    teacher: Kept | None = None


def place_inputs(batch: PackedBatch, mesh: Mesh) -> Inputs:
    """Inputs on the devices, sharded by row."""
    host = (batch.tokens, batch.targets, batch.segments, batch.positions)
    return Inputs(*jax.device_put(host, by_row(mesh)))
