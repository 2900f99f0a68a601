"""A worker without a model, which lets simulated time pass and returns the least that works.

An adapter is a hash of the names and advantages that it was trained on.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import selectors
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from configs.schema import Config
from pipeline.clock import PhaseClock
from pipeline.protocols import ProcessUse
from pipeline.types import (
    AdapterRef,
    Completion,
    DecodeWork,
    ExportReport,
    Published,
    Restored,
    Rollout,
    RolloutRequest,
)
from tests.run_process import Process, Script
from tests.samples import FRESH, PROBE, PROMPTS, completion, logprobs

Disk = dict[int, tuple[str, dict[str, Any]]]
"""Checkpoints by version: the adapter and the coordinator's state."""


class StubWorker:
    """Samples and learns; continues from the newest checkpoint on `disk`.

    Attributes:
        skill: share of the prompts, from the first, that a version answers right; None: half of
            the answers are right.
        score_error: added to the scored log-probs.
        rates: arguments of the updates.
    """

    def __init__(self, script: Script, *, disk: Disk, seed: int = 0) -> None:
        self.script, self.phases, self.disk = script, PhaseClock(script.clock), disk
        self.version, self.best, self.saving_s = max(disk, default=0), (0, FRESH), 0.0
        self.adapter, self.seed = disk.get(self.version, (FRESH, {}))[0], seed
        self.skill: Callable[[int], float] | None = None
        self.score_error, self.rates = 0.0, list[float | None]()

    async def call(self, phase: str, name: str, *, prompts: int = 0) -> None:
        with self.phases.during(phase):
            await self.script.call(name, prompts=prompts)

    async def use(self) -> ProcessUse:
        return ProcessUse(self.phases.take())

    async def start_trace(self, folder: str) -> None:
        os.makedirs(folder)  # noqa: PTH103  # of an async function

    async def stop_trace(self) -> None:
        pass

    async def load(self, published: Published) -> str:
        await self.call("sync", f"sampler0.load {published.version}")
        self.loaded = published
        return published.sha256

    async def generate(self, requests: Sequence[RolloutRequest], **_: Any) -> list[Completion]:
        self.running = asyncio.create_task(self._decode(requests))
        await asyncio.wait({self.running})
        if self.running.cancelled():
            raise RuntimeError("aborted")
        self.running.result()
        drawn = [self.draw(one) for one in requests]
        self.done = DecodeWork({len(drawn): 1}, len(drawn) * 80, sum(one.num_new for one in drawn))
        return drawn

    async def _decode(self, requests: Sequence[RolloutRequest]) -> None:
        name, prompts = requests[-1].name, len({request.name.prompt_id for request in requests})
        await self.call("decode", f"sampler0.generate:{name.phase} {name.step}", prompts=prompts)

    def draw(self, request: RolloutRequest) -> Completion:
        name, sha256 = request.name, self.loaded.sha256
        noise = int(name.key(self.seed)[0] ^ int(sha256[:8], 16)) % 10**6
        wrong = bool(noise % 2)
        if self.skill is not None:
            wrong = name.prompt_id > round(PROMPTS * self.skill(self.loaded.version))
        text = f"<reasoning>{noise}</reasoning><answer>{2 * name.prompt_id + wrong}</answer>"
        label = {"version": self.loaded.version, "adapter_sha256": sha256}
        found = completion(request, text, ended=noise % 5 > 0, **label)
        found.segments[-1].logprobs[:] = logprobs(found.tokens, sha256)
        return found

    async def finished(self) -> list[Completion]:
        return []

    async def work(self) -> DecodeWork:
        return self.done

    async def abort(self) -> None:
        self.script.note("sampler0.abort")
        self.running.cancel()

    async def resume(self) -> None:
        self.script.note("sampler0.resume")

    async def restore(self) -> Restored:
        return Restored(self.disk[self.version][1] if self.disk else None, where="nowhere")

    def named(self, which: AdapterRef) -> tuple[int, str]:
        others = {"initial": (0, FRESH), "probe": (-1, PROBE), "best": self.best}
        return others.get(which, (self.version, self.adapter))

    async def publish(self, which: AdapterRef = "current") -> Published:
        version, adapter = self.named(which)
        await self.call("sync", f"learner.publish {'probe' if version < 0 else version}")
        return Published(version, adapter, adapter)

    async def score(
        self, completions: Sequence[Completion], *, which: AdapterRef
    ) -> list[np.ndarray]:
        await self.call("score", f"learner.score {which}")
        adapter = self.named(which)[1]
        return [logprobs(one.tokens, adapter) + self.score_error for one in completions]

    async def update(
        self, rollouts: Sequence[Rollout], *, rate: float | None = None
    ) -> dict[str, float]:
        names = [(one.completion.name, one.advantage) for one in rollouts]
        prompts = len({name.prompt_id for name, _ in names})
        await self.call("update", f"learner.update {self.version}", prompts=prompts)
        self.rates.append(rate)
        self.version += 1
        self.adapter = hashlib.sha256(f"{self.adapter}{names}".encode()).hexdigest()
        tokens = sum(len(one.completion.tokens) for one in rollouts if one.reward is not None)
        counts = {"tokens_trained": tokens, "tokens_padded": tokens, "positions": 2.0 * tokens}
        means = {"loss": 1.0, "mismatch_mean": 0.0, "mismatch_p999": 0.0, "padded_share": 0.5}
        return {**means, **counts}

    async def save(self, meta: Mapping[str, Any]) -> None:
        began_s = self.script.clock()
        if self.version not in self.disk:  # else it is complete
            await self.call("checkpoint", f"learner.save {self.version}")
        self.disk.setdefault(self.version, (self.adapter, dict(meta)))
        self.saving_s = self.script.clock() - began_s

    async def saved(self, *, wait: bool) -> float | None:  # noqa: ARG002
        return self.saving_s

    async def keep_best(self) -> None:
        await self.call("checkpoint", f"learner.keep_best {self.version}")
        self.best = (self.version, self.adapter)

    async def recover_best(self, version: int, sha256: str) -> None:
        self.best = (version, sha256)

    async def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        version, _ = self.named(which)
        await self.call("export", f"learner.export {version}")
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103  # of an async function
        return ExportReport(folder, 0.0, sum(len(one.tokens) for one in examples), version)


class StubRun(Process):
    """One process of a run whose worker is the stub, with the checkpoints on `disk`."""

    def __init__(
        self,
        config: Config,
        *,
        disk: Disk | None = None,
        script: Script | None = None,
        **more: Any,
    ) -> None:
        script, disk = script or Script(), {} if disk is None else disk
        worker: Any = StubWorker(script, disk=disk, seed=config.run.seed)
        self.worker: StubWorker = worker
        restored = disk[worker.version][1] if disk else None
        workers = {"learner": worker, "samplers": [worker]}
        super().__init__(config, restored=restored, script=script, **workers, **more)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock, in which sleeping takes no real time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.seconds


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "all tasks wait for each other"
        self._loop.seconds += max(timeout, 0.0)
        found: list[Any] = super().select(0)
        return found
