"""The sampler's process: one base, one engine, the adapter it was last given."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.devices import open_mesh
from configs.schema import Config
from pipeline.datatypes import Completion, RolloutRequest

if TYPE_CHECKING:
    from pipeline.decode.engine import Engine
    from pipeline.model.policy import Params, Policy


class SamplerActor:
    """A plain class; `actors.handles` makes a Ray actor of it.

    JAX is imported in `start`, so that the driver can name this class without starting JAX.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy: Policy
        self.engine: Engine
        self.adapter: Params
        self.version = -1
        self.sha256 = ""

    def start(self) -> float:
        """Opens the devices, loads the base, compiles; returns the seconds that loading took.

        Raises:
            ValueError: if devices, weights or tokenizer are not what the configuration says.
            FileNotFoundError: if weights or tokenizer are not there.
        """
        from pipeline.decode.engine import Engine
        from pipeline.model.policy import open_policy
        from pipeline.model.vocabulary import Vocabulary
        from pipeline.tokenizer import Tokenizer

        config, folder = self.config, Path(self.config.model.path)
        mesh = open_mesh(platform=config.plan.platform, count=config.plan.devices_per_sampler)
        vocabulary = Vocabulary.of(Tokenizer(folder), config.rollout)
        started = time.monotonic()
        self.policy, base = open_policy(
            folder, dtype=config.model.dtype, lora=config.lora, mesh=mesh
        )
        load_s = time.monotonic() - started
        self.engine = Engine(self.policy, base, config, vocabulary)
        return load_s

    def load(self, version: int, sha256: str, payload: Mapping[str, np.ndarray]) -> str:
        """Takes over an adapter; returns the hash of what arrived on the devices."""
        from pipeline.model import lora

        del sha256  # the sender's claim; the answer is what is found here
        self.adapter = self.policy.place_adapter(payload)
        self.version, self.sha256 = version, lora.sha256(self.adapter)
        return self.sha256

    def generate(
        self, requests: Sequence[RolloutRequest], *, temperature: float
    ) -> list[Completion]:
        """See `pipeline.decode.engine.Engine.generate`."""
        return self.engine.generate(
            requests,
            adapter=self.adapter,
            version=self.version,
            adapter_sha256=self.sha256,
            temperature=temperature,
        )

    def abort(self) -> None:
        """Ends a running `generate` at its next look."""
        self.engine.abort()
