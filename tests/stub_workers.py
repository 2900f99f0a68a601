"""Workers without a model: they note their calls, let time pass and return the least that works.

An adapter is a hash of the names and advantages that it was trained on.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import selectors
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config
from pipeline.clock import Heartbeat, PhaseClock
from pipeline.compute.builds import Building, Ready
from pipeline.data.packed_batch import PackedRow
from pipeline.data.splits import LoadedData
from pipeline.plan.sizes import Sizes
from pipeline.protocols import ProcessUse, SamplerTimes
from pipeline.types import (
    AdapterRef,
    Completion,
    DecodeWork,
    ExportReport,
    OpenedAdapter,
    Published,
    Restored,
    Rollout,
    RolloutRequest,
)
from tests.run_process import Process, Script
from tests.samples import FRESH, PROBE, PROMPTS, completion, logprobs

Disk = dict[int, tuple[str, dict[str, Any], str]]
"""Checkpoints by version: the adapter, the coordinator's state, the previous adapter."""


class StubProcess:
    """Where the time of a process goes."""

    def __init__(self, script: Script) -> None:
        self.script, self.phases = script, PhaseClock(script.clock)

    async def call(self, phase: str, name: str, *, prompts: int = 0) -> None:
        with self.phases.during(phase):
            await self.script.call(name, prompts=prompts)

    async def prepare(self, sizes: Sizes) -> Ready:  # noqa: ARG002
        return Ready()

    async def building(self) -> Building:
        return Building()

    async def heartbeat(self) -> Heartbeat:
        return self.phases.heartbeat()

    async def use(self) -> ProcessUse:
        return ProcessUse(self.phases.take())

    async def start_trace(self, folder: str) -> None:
        os.makedirs(folder)  # noqa: PTH103  # of an async function

    async def stop_trace(self) -> None:
        pass


class StubSampler(StubProcess):
    """Answers doubled prompt ids, right or wrong.

    Attributes:
        skill: share of the prompts, from the first, that a version answers right; None: half of
            the answers are right.
        answer: replaces the text of a request, if it returns one.
    """

    def __init__(self, script: Script, *, seed: int = 0, number: int = 0) -> None:
        super().__init__(script)
        self.name, self.seed, self.adapter, self.version = f"sampler{number}", seed, "", -2
        self.running: asyncio.Task[None] | None = None
        self.done = DecodeWork()
        self.skill: Callable[[int], float] | None = None
        self.answer: Callable[[RolloutRequest], str | None] = lambda _: None

    async def load(self, published: Published) -> str:
        await self.call("sync", f"{self.name}.load {published.version}")
        self.version, self.adapter = published.version, str(published.payload)
        return self.adapter

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,  # noqa: ARG002
    ) -> list[Completion]:
        self.running = asyncio.create_task(self._decode(requests))
        await asyncio.wait({self.running})
        if self.running.cancelled():
            raise RuntimeError("aborted")
        self.running.result()
        drawn = [self.draw(request, temperature) for request in requests]
        tokens = [one.num_new for one in drawn]
        self.done = DecodeWork({len(drawn): 1}, len(drawn) * max(tokens), sum(tokens))
        return drawn

    async def _decode(self, requests: Sequence[RolloutRequest]) -> None:
        name, prompts = requests[-1].name, len({request.name.prompt_id for request in requests})
        await self.call("decode", f"{self.name}.generate:{name.phase} {name.step}", prompts=prompts)
        if self.script.stop.is_set():
            await asyncio.Event().wait()  # until it is aborted

    def draw(self, request: RolloutRequest, temperature: float) -> Completion:  # noqa: ARG002
        name = request.name
        noise = int(name.key(self.seed)[0] ^ int(self.adapter[:8], 16)) % 10**6
        wrong = bool(noise % 2)
        if self.skill is not None:
            wrong = name.prompt_id > round(PROMPTS * self.skill(self.version))
        text = f"<reasoning>{noise}</reasoning><answer>{2 * name.prompt_id + wrong}</answer>"
        label: dict[str, Any] = {"version": self.version, "adapter_sha256": self.adapter}
        given = self.answer(request)
        ended = given is not None or noise % 5 > 0
        found = completion(request, given or text, ended=ended, **label)
        found.segments[-1].logprobs[:] = logprobs(found.tokens, self.adapter)
        return found

    async def finished(self) -> list[Completion]:
        return []

    async def work(self) -> DecodeWork:
        return self.done

    async def abort(self) -> None:
        self.script.note(f"{self.name}.abort")
        if self.running is not None:
            self.running.cancel()

    async def resume(self) -> None:
        self.script.note(f"{self.name}.resume")

    async def open_adapter(self, path: str | None) -> OpenedAdapter:
        raise NotImplementedError

    async def sampler_times(self) -> SamplerTimes:
        raise NotImplementedError


class StubLearner(StubProcess):
    """Continues from the newest checkpoint on `disk`.

    Attributes:
        skips: versions whose update is skipped.
        metrics: override the metrics of each update.
        score_error: added to the scored log-probs.
        rates, seen: arguments of the updates.
    """

    def __init__(self, script: Script, *, disk: Disk) -> None:
        super().__init__(script)
        self.disk, self.version, self.best = disk, max(disk, default=0), (0, FRESH)
        self.adapter, _, self.previous = disk.get(self.version, (FRESH, {}, FRESH))
        self.metrics: dict[str, float] = {}
        self.skips: Sequence[int] = ()
        self.score_error = self.saving_s = 0.0
        self.rates: list[float | None] = []
        self.seen: list[Sequence[Rollout]] = []

    async def micro_batch_s(self) -> float:
        raise NotImplementedError

    async def restore(self) -> Restored:
        return Restored(self.disk[self.version][1] if self.disk else None, where="nowhere")

    def named(self, which: AdapterRef) -> tuple[int, str]:
        found: dict[AdapterRef, tuple[int, str]] = {
            "current": (self.version, self.adapter),
            "previous": (self.version - 1, self.previous),
            "initial": (0, FRESH),
            "probe": (-1, PROBE),
            "best": self.best,
        }
        return found[which]

    async def publish(self, which: AdapterRef = "current") -> Published:
        version, adapter = self.named(which)
        await self.call("sync", f"learner.publish {'probe' if version < 0 else version}")
        return Published(version, adapter, adapter)

    async def score(
        self, completions: Sequence[Completion], *, which: AdapterRef
    ) -> list[np.ndarray]:
        await self.call("score", "learner.score probe" if which == "probe" else "learner.score")
        adapter = self.named(which)[1]
        return [logprobs(one.tokens, adapter) + self.score_error for one in completions]

    async def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        examples = [one for row in sequences for one in row]
        learned = sum(len(one.completion_tokens) for one in examples)
        return await self._learn("sft_update", [one.id for one in examples], learned)

    async def update(
        self, rollouts: Sequence[Rollout], *, rate: float | None = None
    ) -> dict[str, float]:
        self.rates.append(rate)
        self.seen.append(rollouts)
        names = [(one.completion.name, one.advantage) for one in rollouts]
        learned = sum(len(one.completion.tokens) for one in rollouts if one.reward is not None)
        prompts = len({name.prompt_id for name, _ in names})
        return await self._learn("update", names, learned, prompts=prompts)

    async def _learn(
        self, call: str, what: object, tokens: float, prompts: int = 0
    ) -> dict[str, float]:
        await self.call("update", f"learner.{call} {self.version}", prompts=prompts)
        await asyncio.sleep(0)  # concurrent tasks start
        skipped, self.previous = self.version in self.skips, self.adapter
        self.version += 1
        if skipped:
            return {"skipped_updates": 1.0, "tokens_trained": 0.0, "tokens_padded": tokens} | {
                "loss": float("nan"),
                "grad_norm": float("nan"),
                "positions": 2.0 * tokens,
            }
        self.adapter = hashlib.sha256(f"{self.adapter}{what}".encode()).hexdigest()
        counts = {"tokens_trained": tokens, "tokens_padded": tokens, "positions": 2.0 * tokens}
        counts["padded_share"] = 0.5
        return {"loss": 1.0, "mismatch_mean": 0.0, "mismatch_p999": 0.0, **counts, **self.metrics}

    async def save(self, meta: Mapping[str, Any]) -> None:
        began_s = self.script.clock()
        if self.version not in self.disk:  # else it is complete
            await self.call("checkpoint", f"learner.save {self.version}")
        self.disk.setdefault(self.version, (self.adapter, dict(meta), self.previous))
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
        version, adapter = self.named(which)
        await self.call("export", f"learner.export {version}")
        _write(Path(folder), f"{version} {adapter}")
        return ExportReport(folder, 0.0, sum(len(one.tokens) for one in examples), version)


def _write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter").write_text(text)


class StubRun(Process):
    """One process of a run whose workers are the stubs.

    Args:
        config: of the run.
        disk: the run's checkpoints.
        data: the run's prompts.
        script: actions and durations of the workers' calls.
        started: see `Process`.
    """

    def __init__(
        self,
        config: Config,
        *,
        disk: Disk | None = None,
        data: LoadedData | None = None,
        script: Script | None = None,
        started: float | None = None,
    ) -> None:
        script, disk = script or Script(), {} if disk is None else disk
        self.learner, self.disk = StubLearner(script, disk=disk), disk
        self.sampler = StubSampler(script, seed=config.run.seed)
        super().__init__(
            config,
            learner=self.learner,
            samplers=[self.sampler],
            restored=disk[self.learner.version][1] if disk else None,
            script=script,
            data=data,
            started=started,
        )


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
