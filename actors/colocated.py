"""One process that owns all devices: sampler and learner on one copy of the base."""

from __future__ import annotations

from typing import Any

from actors.learner import LearnerActor
from actors.sampler import SamplerActor
from configs.schema import Config
from pipeline.compute.device_memory import catch_out_of_memory
from pipeline.compute.opening import start_loading
from pipeline.compute.program_cache import share_programs
from pipeline.contracts.adapters import AdapterRef
from pipeline.contracts.builds import Ready
from pipeline.contracts.sizes import Sizes, sized


class ColocatedActor(LearnerActor, SamplerActor):
    """Answers as a learner and as a sampler; adapters stay where they are."""

    def __init__(self, config: Config) -> None:
        SamplerActor.__init__(self, config)
        LearnerActor.__init__(self, config)

    def prepare(self, sizes: Sizes) -> Ready:
        """Opens devices and model once, for both; see `LearnerActor.prepare`."""
        self.config, known = sized(self.given, sizes), len(self.log.read().done)
        if self.opening is None:
            self.opening = start_loading(self.config, role="learner")
        load_s = self.learn(self.opening)
        self.serve(self.opening)
        share_programs()
        return Ready(load_s, self.log.read().done[known:])

    def publish(self, *, which: AdapterRef) -> tuple[tuple[int, str], Any]:
        """Version and hash of an adapter, and its name: the adapter itself does not move."""
        label, _ = LearnerActor.publish(self, which=which)
        return label, which

    def load(self, version: int, sha256: str, payload: Any) -> str:
        """Points the engine to the learner's adapter; returns its hash.

        Args:
            version: of the adapter.
            sha256: the sender's claim; the returned hash is what is found here.
            payload: what `publish` returned: which adapter.
        """
        from pipeline.compute.model import lora

        del sha256

        def take() -> None:
            adapter, _ = self._adapter(payload)
            self.take_over(adapter, version=version, sha256=lora.sha256(adapter))

        catch_out_of_memory("sync", take)
        return self.sha256
