"""The learner's training state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np
import optax

from pipeline.compute.model.policy import Params


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

    def on_host(self) -> LearnerState:
        """A copy in host memory."""
        arrays = self.adapter, self.optimizer, self.reference, self.previous
        adapter, optimizer, reference, previous = jax.tree.map(np.array, arrays)
        return replace(
            self, adapter=adapter, optimizer=optimizer, reference=reference, previous=previous
        )
