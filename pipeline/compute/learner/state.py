"""All that training changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np
import optax

from pipeline.compute.model.policy import Params

_Donated = tuple[Params, optax.OptState, Params | None]


@dataclass(frozen=True)
class LearnerState:
    """All that training changes.

    Attributes:
        adapter: float32 parameters.
        optimizer: optax state.
        version: steps learned from; the policy version.
        updates: optimizer updates made in this phase.
        reference: the adapter that the KL term pulls towards, which is the one at the beginning of
            the GRPO phase; None where that is the base itself or there is no KL term.
        previous: the adapter of the version before, under which rollouts were drawn ahead; where
            GRPO begins it is the current one. None: nothing is drawn ahead.
    """

    adapter: Params
    optimizer: optax.OptState
    version: int
    updates: int
    reference: Params | None = None
    previous: Params | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is gone, as it is when a program takes it and then fails."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._donated))

    def on_host(self) -> LearnerState:
        """A copy in host memory; `previous`, which no program takes, is where it was."""
        return self._with(jax.tree.map(np.array, self._donated))

    def on_device(self, place: jax.sharding.Sharding) -> LearnerState:
        """What `on_host` returned, bit for bit, in this place."""
        return self._with(jax.device_put(self._donated, place))

    @property
    def _donated(self) -> _Donated:
        return self.adapter, self.optimizer, self.reference

    def _with(self, donated: _Donated) -> LearnerState:
        adapter, optimizer, reference = donated
        return replace(self, adapter=adapter, optimizer=optimizer, reference=reference)
