"""The sampler's process: one base, one engine, the adapter it was last given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from actors.opening import OpenedModel, open_model
from configs.schema import Config
from pipeline.datatypes import Completion, OpenedAdapter, RolloutRequest, Work

if TYPE_CHECKING:
    from pipeline.decode.engine import Engine
    from pipeline.decode.rollout_weights import RolloutWeights
    from pipeline.model.policy import Params, Policy


class SamplerActor:
    """A plain class; `actors.handles` makes a Ray actor of it.

    JAX is imported in `start`, so that the driver can name this class without starting JAX.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy: Policy
        self.engine: Engine
        self.weights: RolloutWeights
        self.adapter: Params
        self.version = -1
        self.sha256 = ""
        self._opened: dict[str | None, tuple[Params, OpenedAdapter]] = {}

    def start(self) -> float:
        """Opens devices and model, compiles; returns the seconds that loading took.

        Raises:
            ValueError: if devices, weights or tokenizer are not what the configuration says.
            FileNotFoundError: if weights or tokenizer are not there.
        """
        opened = open_model(self.config, which="sampler")
        self.serve(opened)
        return opened.load_s

    def serve(self, opened: OpenedModel) -> None:
        """Makes the engine on a model that is open already."""
        from pipeline.decode.engine import Engine
        from pipeline.decode.rollout_weights import RolloutWeights

        self.policy = opened.policy
        self.weights = RolloutWeights(opened.policy, opened.base, self.config)
        self.engine = Engine(
            self.weights.policy,
            self.weights.base,
            self.config,
            opened.vocabulary,
            text_of=opened.tokenizer.decode,
        )

    def load(self, version: int, sha256: str, payload: Mapping[str, np.ndarray]) -> str:
        """Takes over an adapter; returns the hash of what arrived on the devices."""
        from pipeline.model import lora

        del sha256  # the sender's claim; the answer is what is found here
        adapter = self.policy.place_adapter(payload)
        self.take_over(adapter, version=version, sha256=lora.sha256(adapter))
        return self.sha256

    def take_over(self, adapter: Params, *, version: int, sha256: str) -> None:
        """Draws under `adapter`, which is on the devices, from now on."""
        self.weights.load(adapter)
        self.adapter, self.version, self.sha256 = adapter, version, sha256

    def open_adapter(self, path: str | None) -> OpenedAdapter:
        """Takes over the adapter at `path`, or none: the base alone. Opens each only once.

        Raises:
            FileNotFoundError: if there is no adapter.
            ValueError: if it cannot be used, or is not for this base.
        """
        if path not in self._opened:
            self._opened[path] = self._open(path)
        adapter, opened = self._opened[path]
        self.take_over(adapter, version=opened.version, sha256=opened.sha256)
        return opened

    def _open(self, path: str | None) -> tuple[Params, OpenedAdapter]:
        from pipeline.model import lora
        from pipeline.model.adapter_source import load_adapter

        if path is None:
            adapter = self.policy.no_adapter()
            return adapter, OpenedAdapter(0, lora.sha256(adapter), "the base")
        loaded = load_adapter(path, self.policy)
        adapter = self.policy.place_adapter(loaded.adapter)
        return adapter, OpenedAdapter(loaded.version, lora.sha256(adapter), loaded.what)

    def generate(
        self, requests: Sequence[RolloutRequest], *, temperature: float, enough: int | None = None
    ) -> list[Completion]:
        """See `pipeline.decode.engine.Engine.generate`."""
        return self.engine.generate(
            requests,
            base=self.weights.base,
            adapter=self.weights.adapter,
            version=self.version,
            adapter_sha256=self.sha256,
            temperature=temperature,
            enough=enough,
        )

    def work(self) -> Work:
        """What the last `generate` has computed."""
        return self.engine.work

    def abort(self) -> None:
        """Ends a running `generate` at its next look."""
        self.engine.abort()

    def resume(self) -> None:
        """Takes an `abort` back."""
        self.engine.resume()
