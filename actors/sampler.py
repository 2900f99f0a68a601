"""The sampler's process: one base, one engine, the adapter it was last given."""

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
from pipeline.contracts.speeds import SamplerSpeed

if TYPE_CHECKING:
    from pipeline.compute.decode.engine import Engine
    from pipeline.compute.decode.rollout_weights import RolloutWeights
    from pipeline.compute.model.policy import Params, Policy


class SamplerActor:
    """A plain class; `actors.handles` makes a Ray actor of it.

    JAX is imported in `prepare`, so that the driver can name this class without starting JAX.
    """

    def __init__(self, config: Config) -> None:
        self.given = self.config = config
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
        """Opens devices and model, compiles; later on what other sizes need. May be tried again.

        Raises:
            ValueError: if devices, weights or tokenizer are not what the configuration says.
            FileNotFoundError: if weights or tokenizer are not there.
            OutOfMemory: if these sizes are too much.
        """
        self.config, known = sized(self.given, sizes), len(self.log.read().done)
        if self.opening is None:
            self.opening = start_loading(self.config, role="sampler")
        load_s = self.serve(self.opening)
        share_programs()
        return Ready(load_s, self.log.read().done[known:])

    def serve(self, model: LoadingModel | OpenedModel) -> float:
        """Compiles while the base is read, then waits for it; returns the seconds that this took.

        Raises:
            OutOfMemory: if the sizes of the configuration are too much.
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
            self._slots = None  # unless it succeeds, no size has programs
            catch_out_of_memory("generate", lambda: self.engine.resize(config, log=self.log))
        self._slots = slots
        return model.wait().load_s

    def building(self) -> Building:
        """How far compiling is; answered meanwhile."""
        return self.log.read()

    def load(self, version: int, sha256: str, payload: Mapping[str, np.ndarray]) -> str:
        """Takes over an adapter; returns the hash of what arrived on the devices.

        Raises:
            OutOfMemory: if there is no room for it.
        """
        from pipeline.compute.model import lora

        del sha256  # the sender's claim; the answer is what is found here

        def take() -> None:
            adapter = self.policy.place_adapter(payload)
            self.take_over(adapter, version=version, sha256=lora.sha256(adapter))

        catch_out_of_memory("sync", take)
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
            OutOfMemory: if there is no room for so many slots.
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

    def drawing_speed(self) -> SamplerSpeed:
        """See `Engine.speed`; a sampler without an adapter measures with a fresh one.

        Raises:
            OutOfMemory: if there is no room for so many slots.
        """

        def work() -> SamplerSpeed:
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
        """What the last `generate` has computed."""
        return self.engine.work

    def sampler_memory(self) -> MemoryUse:
        """What drawing holds of the devices, and what they have held."""
        return memory_use(self.engine.needs)

    def abort(self) -> None:
        """Ends a running `generate` at its next look."""
        self.engine.abort()

    def resume(self) -> None:
        """Takes an `abort` back."""
        self.engine.resume()
