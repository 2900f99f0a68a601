"""Runs of the real colocated actor without Ray, on two layers, compiled once per process."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Concatenate

import jax
import numpy as np
import pytest

from actors.colocated_actor import ColocatedActor
from actors.handles import ColocatedHandle, P, T
from configs.schema import Config
from pipeline.compute.learner.checkpoint import Checkpoints
from pipeline.data.splits import LoadedData
from pipeline.plan.sizes import Sizes
from pipeline.run.run_folder import RunFolder
from pipeline.types import (
    AdapterRef,
    Completion,
    ExportReport,
    Published,
    Restored,
    Rollout,
    RolloutRequest,
)
from tests import tiny
from tests.actors.two_layers import give_model
from tests.run_process import Killed, Process, Script, left_behind
from tests.samples import completion, make_data

PROMPTS = 8
VALIDATED: dict[str, Any] = {
    "data": {"validation": {"path": "validation.jsonl"}},
    "eval": {"every_steps": 2, "metric": "reward"},
}


def parity(completion: str) -> float:
    """Whether the sum of the characters is odd: equal for half of the groups of two."""
    return float(sum(map(ord, completion)) % 2)


def real_config(folder: Path, **tables: Mapping[str, Any]) -> Config:
    """A configuration of a run of the actor; what its programs depend on is fixed."""
    parts = [{"name": "odd", "function": "tests.real_actor:parity"}]
    given: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "dir": str(folder), "seed": 5},
        "rewards": {"functions": parts},
        "rollout": {"max_new_tokens": 12},
        "learner": {"importance_cap": 2.0},
        "budget": {"steps": 5},
        "checkpoint": {"every_steps": 1},
        "wandb": {"mode": "disabled"},
    }
    names = given.keys() | tables.keys()
    return tiny.make_config(
        **{name: {**given.get(name, {}), **tables.get(name, {})} for name in names}
    )


def compiled_actor(folder: Path) -> ColocatedActor:
    """An actor with the programs of all runs, SFT and partial rollouts included."""
    config = real_config(
        folder,
        run={"phases": ["sft", "grpo"]},
        sft={"train": {"path": "sft.jsonl"}, "steps": 2, "sequences_per_step": 2},
        rollout={"partial": "keep", "cut_off": 0.6},
    )
    with pytest.MonkeyPatch.context() as patch:
        actor = ColocatedActor(config)
        give_model(actor, patch)
        actor.prepare(Sizes.of(config))
    return actor


class InProcess(ColocatedHandle):
    """The handle of an actor in this process; calls that are work are noted in the script.

    Attributes:
        loses_writes: whether no write to the checkpoints ends any more; who waits is killed.
        seen: rollouts of the updates.
        metrics: override those of each update.
        skips: versions whose updates get an advantage that is no number.
        skill: share of the prompts, from the first, that a version answers right in evaluations;
            None: what the model answers.
    """

    def __init__(self, actor: ColocatedActor, script: Script, config: Config) -> None:
        super().__init__(actor, "learner")
        self.script, self.loses_writes = script, False
        self.metrics: dict[str, float] = {}
        self.skips: Collection[int] = ()
        self.skill: Callable[[int], float] | None = None
        actor.config = actor.learner._config = config
        actor.resume()  # a signal aborts the sampler of a process that ends
        actor.learner.state = actor.learner._fresh()
        settings = config.checkpoint
        actor.checkpoints = Checkpoints(
            RunFolder.of(config).checkpoints, keep=settings.keep, keep_every=settings.keep_every
        )
        self.restored = actor.restore()
        self.seen: list[Sequence[Rollout]] = []

    async def _call(
        self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        call = method.__name__
        if call in {"update", "sft_update", "save", "keep_best"}:
            await self.script.call(f"{call} {self.actor.learner.state.version}")
        elif call == "score":
            await self.script.call(call)
        found: T = getattr(self.actor, call)(*args, **kwargs)
        return found

    def lose_writes(self) -> None:
        """From now on no checkpoint is completed."""
        self.actor.checkpoints.wait()
        self.actor.checkpoints._writer.shutdown()
        endless: Any = SimpleNamespace(done=lambda: False, result=lambda: None)
        writer: Any = SimpleNamespace(submit=lambda *_: endless)
        self.actor.checkpoints._writer, self.loses_writes = writer, True

    def close(self) -> None:
        """Waits for what is being written when the run ends."""
        self.actor.checkpoints.wait()
        if not self.loses_writes:
            self.actor.checkpoints._writer.shutdown()

    def _written(self) -> None:
        if self.loses_writes:
            raise Killed

    async def load(self, published: Published) -> str:
        await self.script.call(f"load {published.version}")
        sha256: str = self.actor.load(published.version, published.payload)
        return sha256

    async def generate(self, requests: Sequence[RolloutRequest], **how: Any) -> list[Completion]:
        last = requests[-1].name
        await self.script.call(f"generate:{last.phase} {last.step}")
        if self.skill is None or last.phase in {"train", "probe"}:
            return await super().generate(requests, **how)
        label: dict[str, Any] = {"version": self.actor.version, "adapter_sha256": self.actor.sha256}
        right = round(len(requests) * self.skill(self.actor.version))
        return [
            completion(
                one,
                f"<answer>{2 * one.name.prompt_id + (one.name.prompt_id > right)}</answer>",
                **label,
            )
            for one in requests
        ]

    async def restore(self) -> Restored:
        return self.restored

    async def publish(self, which: AdapterRef = "current") -> Published:
        if which == "best":
            self._written()
        (version, sha256), payload = self.actor.publish(which=which)
        await self.script.call(f"publish {version}")
        return Published(version, sha256, payload)

    async def update(
        self, rollouts: Sequence[Rollout], *, rate: float | None = None
    ) -> dict[str, float]:
        self.seen.append(rollouts)
        if self.actor.learner.state.version in self.skips:
            rollouts = [replace(one, advantage=float("nan")) for one in rollouts]
        return {**await super().update(rollouts, rate=rate), **self.metrics}

    async def saved(self, *, wait: bool) -> float | None:
        if wait:
            self._written()
        return await super().saved(wait=wait)

    async def recover_best(self, version: int, sha256: str) -> None:
        self._written()
        await super().recover_best(version, sha256)

    async def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        """Makes the folder alone."""
        version = self.actor.adapter_of(which)[1]
        await self.script.call(f"export {version}")
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103  # of an async function
        return ExportReport(folder, 0.0, sum(len(one.tokens) for one in examples), version)


class RealRun(Process):
    """One process of a run with the actor in its initial state, or that of its checkpoint."""

    def __init__(
        self,
        config: Config,
        actor: ColocatedActor,
        *,
        script: Script | None = None,
        data: LoadedData | None = None,
    ) -> None:
        script = script or Script()
        self.worker = InProcess(actor, script, config)
        super().__init__(
            config,
            learner=self.worker,
            samplers=[self.worker],
            restored=self.worker.restored.meta,
            script=script,
            data=data or make_data(train=PROMPTS, validation=3, test=3, sft=6),
        )

    @property
    def version(self) -> int:
        """The learner's version."""
        return self.worker.actor.learner.state.version

    @property
    def result(self) -> tuple[dict[str, Any], list[int], list[np.ndarray]]:
        """Records, alarms, adapter and optimizer state."""
        state = self.worker.actor.learner.state
        leaves = jax.tree.leaves((state.adapter, state.optimizer))
        alarms = [entry["step"] for entry in self.folder.valid_entries("alarm")]
        return left_behind(self.folder), alarms, [np.array(leaf) for leaf in leaves]
