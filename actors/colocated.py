"""One process that owns all devices: sampler and learner on one copy of the base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from actors.learner import PROBE_VERSION, LearnerActor
from actors.opening import open_model
from actors.sampler import SamplerActor
from configs.schema import Config
from pipeline.datatypes import Which


class ColocatedActor(LearnerActor, SamplerActor):
    """Answers as a learner and as a sampler; adapters stay where they are."""

    def __init__(self, config: Config) -> None:
        SamplerActor.__init__(self, config)
        LearnerActor.__init__(self, config)

    def start(self) -> float:
        """Opens devices and model once, for both."""
        opened = open_model(self.config, which="learner")
        self.learn(opened)
        self.serve(opened)
        return opened.load_s

    def publish(self, *, which: Which) -> tuple[tuple[int, str], Mapping[str, np.ndarray]]:
        """Version and hash; the adapter itself does not move."""
        label, _ = LearnerActor.publish(self, which=which)
        return label, {}

    def load(self, version: int, sha256: str, payload: Mapping[str, Any]) -> str:
        """Points the engine to the learner's adapter; returns its hash."""
        from pipeline.model import lora

        del sha256, payload
        current = self.learner.state.version
        named: dict[int, Which] = {PROBE_VERSION: "probe", current: "current"}
        adapter, _ = self._adapter(named.get(version, "best"))
        self.take_over(adapter, version=version, sha256=lora.sha256(adapter))
        return self.sha256
