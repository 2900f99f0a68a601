"""The sampler's process: one base, one engine, and the adapter that was loaded last."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from actors.model_actor import ModelActor, Role, during
from configs.schema import Config
from pipeline.compute.device_memory import catch_out_of_memory
from pipeline.compute.opening import OpenedModel
from pipeline.plan.sizes import WorkerPhase
from pipeline.protocols import SamplerTimes
from pipeline.types import Completion, DecodeWork, OpenedAdapter, RolloutRequest

if TYPE_CHECKING:
    from pipeline.compute.decode.engine import Engine
    from pipeline.compute.decode.rollout_weights import RolloutWeights
    from pipeline.compute.model.policy import Params, Policy


class SamplerActor(ModelActor):
    """Hosts the rollout engine. Out of memory raises `OutOfMemory`."""

    role: Role = "sampler"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.policy: Policy
        self.engine: Engine
        self.weights: RolloutWeights
        self.adapter: Params
        self.version = -1
        self.sha256 = ""
        self._slots: int | None = None
        self._opened: dict[str | None, tuple[Params, int, str]] = {}
        self._finished = deque[Completion]()

    def open(self, model: OpenedModel) -> None:
        """See `ModelActor`."""
        from pipeline.compute.decode.engine import Engine
        from pipeline.compute.decode.rollout_weights import RolloutWeights, rollout_policy

        config, slots = self.config, self.config.plan.slots
        if not hasattr(self, "engine"):
            self.policy = model.policy
            self.engine = self.compile(
                "generate",
                lambda: Engine(
                    rollout_policy(model.policy, config),
                    None,
                    config,
                    model.vocabulary,
                    text_of=model.tokenizer.decode,
                    log=self.log,
                    phases=self.phases,
                ),
            )
            self.weights = catch_out_of_memory(
                "load", lambda: RolloutWeights(model.policy, model.base, config)
            )
            # Merged weights take their memory from here on.
            catch_out_of_memory("sync", lambda: self.weights.load(self.policy.no_adapter()))
        elif slots != self._slots:
            self._slots = None  # no programs exist unless resizing succeeds
            self.compile("generate", lambda: self.engine.resize(config, log=self.log))
        self._slots = slots

    def programs(self, model: OpenedModel) -> list[str]:
        """See `ModelActor`."""
        from pipeline.compute.decode.programs import DecodePrograms
        from pipeline.compute.decode.rollout_weights import rollout_policy

        if self.config.plan.slots == self._slots:
            return []
        policy = rollout_policy(model.policy, self.config)
        return list(DecodePrograms(policy, self.config, model.vocabulary).programs)

    @during("sync")
    def load(self, version: int, payload: Mapping[str, np.ndarray]) -> str:
        """Loads an adapter; returns the hash of the adapter on the devices."""
        return self.set_adapter(self.policy.place_adapter(payload), version=version)

    def set_adapter(self, adapter: Params, *, version: int) -> str:
        """Sets the adapter, already on the devices, for later rollouts; returns its hash."""
        from pipeline.compute.model import lora

        self.weights.load(adapter)
        self.adapter, self.version, self.sha256 = adapter, version, lora.sha256(adapter)
        return self.sha256

    def open_adapter(self, path: str | None) -> OpenedAdapter:
        """Loads the adapter at `path`, or none (the base alone); reads each path only once.

        Raises:
            FileNotFoundError: if there is no adapter.
            ValueError: if it cannot be used, or is not for this base.
        """
        if path not in self._opened:
            self._opened[path] = self._read_adapter(path)
        adapter, version, what = self._opened[path]
        return OpenedAdapter(version, self.set_adapter(adapter, version=version), what)

    def _read_adapter(self, path: str | None) -> tuple[Params, int, str]:
        from pipeline.compute.model.adapter_source import load_adapter

        if path is None:
            return self.policy.no_adapter(), 0, "the base"
        loaded = load_adapter(path, self.policy)
        return self.policy.place_adapter(loaded.adapter), loaded.version, loaded.what

    @during("generate")
    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        """See `pipeline.compute.decode.engine.Engine.generate`."""
        self._finished.clear()  # those of a call that failed
        return self.engine.generate(
            requests,
            base=self.weights.base,
            adapter=self.weights.adapter,
            version=self.version,
            adapter_sha256=self.sha256,
            temperature=temperature,
            min_finished=min_finished,
            report=self._finished.extend,
        )

    def finished(self) -> list[Completion]:
        """Returns what `generate` has finished since the last call; can be called while it runs."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    @during("generate")
    def sampler_times(self) -> SamplerTimes:
        """See `pipeline.compute.decode.timing.sampler_times`."""
        return self.engine.times(self.weights.base, self.weights.adapter)

    def needs(self) -> dict[WorkerPhase, dict[str, int]]:
        """See `ModelActor`; of sampling."""
        return {"generate": self.engine.needs}

    def work(self) -> DecodeWork:
        """Returns the amount of work of the last `generate`."""
        return self.engine.work

    def abort(self) -> None:
        """Ends a running `generate` before its next segment."""
        self.engine.abort()

    def resume(self) -> None:
        """Reverts `abort`."""
        self.engine.resume()
