"""The learner's training state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np
import optax

from pipeline.compute.model.policy import Params

_Donated = tuple[Params, optax.OptState, Params | None]


@dataclass(frozen=True)
class LearnerState:
    """The training state.

    Attributes:
        adapter: float32 parameters.
        optimizer: optax state.
        version: number of training steps so far; the policy version.
        updates: optimizer updates of this phase.
        reference: the adapter of the KL term's reference policy, equal to the one at the start of
            the GRPO phase; None if the reference is the base, or without a KL term.
        previous: the adapter of the previous version, which sampled rollouts ahead; at the start of
            GRPO the current one. None without sampling ahead.
    """

    adapter: Params
    optimizer: optax.OptState
    version: int
    updates: int
    reference: Params | None = None
    previous: Params | None = None

    @property
    def is_intact(self) -> bool:
        """Whether no array has been deleted, as happens when a program fails after donation."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._donated))

    def on_host(self) -> LearnerState:
        """A copy in host memory; `previous`, which is never donated, stays on the devices."""
        return self._with(jax.tree.map(np.array, self._donated))

    def on_device(self, place: jax.sharding.Sharding) -> LearnerState:
        """The inverse of `on_host`, bit for bit, with this sharding."""
        return self._with(jax.device_put(self._donated, place))

    @property
    def _donated(self) -> _Donated:
        return self.adapter, self.optimizer, self.reference

    def _with(self, donated: _Donated) -> LearnerState:
        adapter, optimizer, reference = donated
        return replace(self, adapter=adapter, optimizer=optimizer, reference=reference)
