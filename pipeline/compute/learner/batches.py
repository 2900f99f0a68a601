"""Micro-batches on the devices: arguments of the compiled programs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from pipeline.compute.model.attention import Layout
from pipeline.compute.model.sharding import by_row
from pipeline.data.packed_batch import PackedBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TopKLogprobs:
    """The k most likely tokens at each position, and the mass of all others.

    Attributes:
        logprobs: descending, normalised over the whole vocabulary.
        tokens: token ids.
        tail: log of the mass of all other tokens.
    """

    logprobs: Float[Array, "rows seq k"]
    tokens: Int[Array, "rows seq k"]
    tail: Float[Array, "rows seq"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """A `PackedBatch` on the devices."""

    tokens: Int[Array, "rows seq"]
    targets: Int[Array, "rows seq"]
    weights: Float[Array, "rows seq"]
    segments: Int[Array, "rows seq"]
    positions: Int[Array, "rows seq"]
    prefixes: Int[Array, "rows seq"] | None

    @property
    def layout(self) -> Layout:
        """The rows' sequences, for attention."""
        return Layout(self.positions, self.segments, self.prefixes)

    @property
    def learned(self) -> Bool[Array, "rows seq"]:
        """Positions whose targets are learned: the only ones with logits."""
        return self.weights > 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceBatch:
    """A `TokenBatch` on the devices, with log-probs of other policies.

    Attributes:
        inputs: tokens, layout and weights in the loss.
        advantages: of the rollout that each target belongs to.
        processed_logprobs: the sampler's, under the distribution that it sampled from; None: no
            importance weight.
        old_logprobs: under the policy at the start of the step; None or NaN: the current policy.
            They come from the first update's own pass, because another program rounds differently,
            by more than a narrow clip range allows.
        reference_logprobs: under the reference; None unless `learner.kl` is a one-token estimator.
        reference: the reference's top k; None unless `learner.kl` is "topk".
        teacher: the teacher's top k; None without a teacher.
        kl_coef: coefficient of the KL term; None without one. An argument of the program, so that
            another value compiles nothing.
    """

    inputs: Inputs
    advantages: Float[Array, "rows seq"]
    processed_logprobs: Float[Array, "rows seq"] | None = None
    old_logprobs: Float[Array, "rows seq"] | None = None
    reference_logprobs: Float[Array, "rows seq"] | None = None
    reference: TopKLogprobs | None = None
    teacher: TopKLogprobs | None = None
    kl_coef: Float[Array, ""] | None = None


def place_inputs(batch: PackedBatch, mesh: Mesh) -> Inputs:
    """Inputs on the devices, sharded by row."""
    host = {field.name: getattr(batch, field.name) for field in fields(Inputs)}
    return Inputs(**jax.device_put(host, by_row(mesh)))
