"""One process that holds all devices: sampler and learner share one copy of the base."""

from __future__ import annotations

from typing import Any

from actors.learner_actor import LearnerActor
from actors.model_actor import during
from actors.sampler_actor import SamplerActor
from pipeline.compute.opening import OpenedModel
from pipeline.plan.sizes import WorkerPhase
from pipeline.types import AdapterRef


class ColocatedActor(LearnerActor, SamplerActor):
    """Learner and sampler in one; adapters stay on the devices."""

    def open(self, model: OpenedModel) -> None:
        """Opens the model once for both."""
        LearnerActor.open(self, model)
        SamplerActor.open(self, model)

    def programs(self, model: OpenedModel) -> list[str]:
        """See `ModelActor`; of learner and sampler."""
        return LearnerActor.programs(self, model) + SamplerActor.programs(self, model)

    def needs(self) -> dict[WorkerPhase, dict[str, int]]:
        """See `ModelActor`; of sampling, scoring and training."""
        return {**LearnerActor.needs(self), **SamplerActor.needs(self)}

    def publish(self, *, which: AdapterRef) -> tuple[tuple[int, str], Any]:
        """Returns version and hash of an adapter, and `which` as its payload."""
        label, _ = LearnerActor.publish(self, which=which)
        return label, which

    @during("sync")
    def load(self, version: int, payload: Any) -> str:
        """Sets the learner's adapter `payload`, as `publish` returned it, as the sampler's."""
        adapter, _ = self.adapter_of(payload)
        return self.set_adapter(adapter, version=version)
