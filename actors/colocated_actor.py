"""One process that holds all devices: sampler and learner share one copy of the base."""

from __future__ import annotations

from typing import Any

from actors.learner_actor import LearnerActor
from actors.sampler_actor import SamplerActor
from configs.schema import Config
from pipeline.compute.device_memory import catch_out_of_memory, memory_use
from pipeline.compute.opening import start_loading
from pipeline.compute.program_cache import share_programs
from pipeline.contracts.adapters import AdapterRef
from pipeline.contracts.builds import Ready
from pipeline.contracts.memory import MemoryUse
from pipeline.contracts.sizes import Sizes, sized


class ColocatedActor(LearnerActor, SamplerActor):
    """Learner and sampler in one; adapters stay on the devices."""

    def __init__(self, config: Config) -> None:
        SamplerActor.__init__(self, config)
        LearnerActor.__init__(self, config)

    def prepare(self, sizes: Sizes) -> Ready:
        """Opens devices and model once for both; see `LearnerActor.prepare`."""
        self.config, known = sized(self.requested, sizes), len(self.log.read().done)
        if self.opening is None:
            self.opening = start_loading(self.config, role="learner")
        load_s = self.open_learner(self.opening)
        self.open_engine(self.opening)
        share_programs()
        return Ready(load_s, self.log.read().done[known:])

    def publish(self, *, which: AdapterRef) -> tuple[tuple[int, str], Any]:
        """Returns version and hash of an adapter, and `which` as its payload."""
        label, _ = LearnerActor.publish(self, which=which)
        return label, which

    def load(self, version: int, sha256: str, payload: Any) -> str:
        """Sets the learner's adapter as the sampler's; returns its hash.

        Args:
            version: of the adapter.
            sha256: the sender's hash; the returned one is computed here.
            payload: `which`, as `publish` returned it.
        """
        from pipeline.compute.model import lora

        del sha256

        def load() -> None:
            adapter, _ = self._adapter(payload)
            self.set_adapter(adapter, version=version, sha256=lora.sha256(adapter))

        catch_out_of_memory("sync", load)
        return self.sha256

    def memory(self) -> MemoryUse:
        """Returns the memory of sampling, scoring and training, as needed and as measured."""
        needs = self.learner.needs
        return memory_use({**needs["score"], **needs["update"], **self.engine.needs})
