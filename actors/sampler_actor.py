"""The sampler's process: one base, one engine, and the adapter that was loaded last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from configs.schema import Config
from pipeline.compute.device_memory import catch_out_of_memory, memory_use
from pipeline.compute.opening import LoadingModel, OpenedModel, start_loading
from pipeline.compute.program_cache import share_programs
from pipeline.contracts.adapters import OpenedAdapter
from pipeline.contracts.builds import Building, BuildLog, Ready
from pipeline.contracts.memory import MemoryUse
from pipeline.contracts.rollouts import Completion, DecodeWork, RolloutRequest
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.speeds import Speeds

if TYPE_CHECKING:
    from pipeline.compute.decode.engine import Engine
    from pipeline.compute.decode.rollout_weights import RolloutWeights
    from pipeline.compute.model.policy import Params, Policy


class SamplerActor:
    """Hosts the rollout engine; a plain class that `actors.handles` runs as a Ray actor.

    JAX is imported in `prepare`, so that the driver can import this class without JAX.
    """

    def __init__(self, config: Config) -> None:
        self.requested = self.config = config
        self.log = BuildLog()
        self.opening: LoadingModel | None = None
        self.policy: Policy
        self.engine: Engine
        self.weights: RolloutWeights
        self.adapter: Params
        self.version = -1
        self.sha256 = ""
        self._slots: int | None = None
        self._opened: dict[str | None, tuple[Params, OpenedAdapter]] = {}

    def prepare(self, sizes: Sizes) -> Ready:
        """Opens devices and model and compiles; a later call compiles for other sizes.

        Can be called again after an error.

        Raises:
            ValueError: if devices, weights or tokenizer do not match the configuration.
            FileNotFoundError: if weights or tokenizer are missing.
            OutOfMemory: if these sizes need too much memory.
        """
        self.config, known = sized(self.requested, sizes), len(self.log.read().done)
        if self.opening is None:
            self.opening = start_loading(self.config, role="sampler")
        load_s = self.open_engine(self.opening)
        share_programs()
        return Ready(load_s, self.log.read().done[known:])

    def open_engine(self, model: LoadingModel | OpenedModel) -> float:
        """Compiles while the base is loaded; returns the seconds that loading took.

        Raises:
            OutOfMemory: if the configured sizes need too much memory.
        """
        from pipeline.compute.decode.engine import Engine
        from pipeline.compute.decode.rollout_weights import RolloutWeights, rollout_policy

        config, slots = self.config, self.config.plan.slots
        if not hasattr(self, "engine"):
            self.policy = model.policy
            self.engine = catch_out_of_memory(
                "generate",
                lambda: Engine(
                    rollout_policy(model.policy, config),
                    None,
                    config,
                    model.vocabulary,
                    text_of=model.tokenizer.decode,
                    log=self.log,
                ),
            )
            opened = catch_out_of_memory("load", model.wait)
            self.weights = catch_out_of_memory(
                "load", lambda: RolloutWeights(opened.policy, opened.base, config)
            )
        elif slots != self._slots:
            self._slots = None  # no programs exist unless resizing succeeds
            catch_out_of_memory("generate", lambda: self.engine.resize(config, log=self.log))
        self._slots = slots
        return model.wait().load_s

    def building(self) -> Building:
        """Returns the progress of compilation; can be called while `prepare` runs."""
        return self.log.read()

    def load(self, version: int, sha256: str, payload: Mapping[str, np.ndarray]) -> str:
        """Loads an adapter; returns the hash of the adapter on the devices.

        Raises:
            OutOfMemory: if the adapter does not fit into memory.
        """
        from pipeline.compute.model import lora

        del sha256  # computed again from the arrays that arrived

        def load() -> None:
            adapter = self.policy.place_adapter(payload)
            self.set_adapter(adapter, version=version, sha256=lora.sha256(adapter))

        catch_out_of_memory("sync", load)
        return self.sha256

    def set_adapter(self, adapter: Params, *, version: int, sha256: str) -> None:
        """Sets the adapter, already on the devices, for all later calls of `generate`."""
        self.weights.load(adapter)
        self.adapter, self.version, self.sha256 = adapter, version, sha256

    def open_adapter(self, path: str | None) -> OpenedAdapter:
        """Loads the adapter at `path`, or none (the base alone); reads each path only once.

        Raises:
            FileNotFoundError: if there is no adapter.
            ValueError: if it cannot be used, or is not for this base.
        """
        if path not in self._opened:
            self._opened[path] = self._open(path)
        adapter, opened = self._opened[path]
        self.set_adapter(adapter, version=opened.version, sha256=opened.sha256)
        return opened

    def _open(self, path: str | None) -> tuple[Params, OpenedAdapter]:
        from pipeline.compute.model import lora
        from pipeline.compute.model.adapter_source import load_adapter

        if path is None:
            adapter = self.policy.no_adapter()
            return adapter, OpenedAdapter(0, lora.sha256(adapter), "the base")
        loaded = load_adapter(path, self.policy)
        adapter = self.policy.place_adapter(loaded.adapter)
        return adapter, OpenedAdapter(loaded.version, lora.sha256(adapter), loaded.what)

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        """See `pipeline.compute.decode.engine.Engine.generate`.

        Raises:
            OutOfMemory: if the slots do not fit into memory.
        """
        return catch_out_of_memory(
            "generate",
            lambda: self._generate(requests, temperature=temperature, min_finished=min_finished),
        )

    def _generate(
        self, requests: Sequence[RolloutRequest], *, temperature: float, min_finished: int | None
    ) -> list[Completion]:
        self._check_slots()
        return self.engine.generate(
            requests,
            base=self.weights.base,
            adapter=self.weights.adapter,
            version=self.version,
            adapter_sha256=self.sha256,
            temperature=temperature,
            min_finished=min_finished,
        )

    def sampler_speed(self) -> Speeds:
        """See `Engine.speed`; without a loaded adapter it measures with a zero one.

        Raises:
            OutOfMemory: if the slots do not fit into memory.
        """

        def work() -> Speeds:
            self._check_slots()
            if not self.sha256:
                self.weights.load(self.policy.no_adapter())
            return self.engine.speed(self.weights.base, self.weights.adapter)

        return catch_out_of_memory("generate", work)

    def _check_slots(self) -> None:
        from pipeline.compute.device_memory import check_fits

        if self.config.plan.hbm_gib is not None:
            check_fits(self.engine.needs, hbm_gib=self.config.plan.hbm_gib)

    def work(self) -> DecodeWork:
        """Returns the amount of work of the last `generate`."""
        return self.engine.work

    def memory(self) -> MemoryUse:
        """Returns the memory of sampling, as needed and as measured."""
        return memory_use(self.engine.needs)

    def abort(self) -> None:
        """Ends a running `generate` before its next segment."""
        self.engine.abort()

    def resume(self) -> None:
        """Reverts `abort`."""
        self.engine.resume()
