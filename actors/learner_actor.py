"""The learner's process: one base, the learner, its checkpoints and exports."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.log import logs
from actors.model_actor import ModelActor, Role, during, make_exporter
from configs.schema import Config
from pipeline.compute.device_memory import catch_out_of_memory
from pipeline.compute.opening import LoadingModel, OpenedModel
from pipeline.contracts.adapters import AdapterRef, BestFile, ExportReport, Restored
from pipeline.contracts.batches import PackedRow
from pipeline.contracts.checkpoint_files import BEST
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.record_files import move_to_superseded
from pipeline.contracts.rollouts import Completion, Rollout
from pipeline.contracts.speeds import Speeds
from pipeline.run.run_folder import RunFolder

if TYPE_CHECKING:
    from pipeline.compute.learner.checkpoint import Checkpoints
    from pipeline.compute.learner.export import Exporter
    from pipeline.compute.learner.learner import Learner
    from pipeline.compute.model.policy import Params

PROBE_VERSION = -1
"""Version of the random adapter that the parity check uses."""


class LearnerActor(ModelActor):
    """Hosts the learner."""

    role: Role = "learner"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.learner: Learner
        self.exporter: Exporter
        self.checkpoints: Checkpoints
        self._tokens: int | None = None

    def open(self, model: LoadingModel | OpenedModel) -> None:
        """See `ModelActor`."""
        from pipeline.compute.learner.checkpoint import Checkpoints
        from pipeline.compute.learner.learner import Learner

        config, tokens = self.config, self.config.plan.micro_batch_tokens
        if not hasattr(self, "learner"):
            with self.compiling():
                self.learner = catch_out_of_memory(
                    "update",
                    lambda: Learner(
                        model.policy,
                        {},
                        config,
                        model.vocabulary,
                        log=self.log,
                        progressed=self.phases.progress,
                    ),
                )
            self._set_base(catch_out_of_memory("load", model.wait))
            self.checkpoints = Checkpoints(
                RunFolder.of(config).checkpoints,
                keep=config.checkpoint.keep,
                keep_every=config.checkpoint.keep_every,
            )
        elif tokens != self._tokens:
            self._tokens = None  # no programs exist unless resizing succeeds
            with self.compiling():
                catch_out_of_memory("update", lambda: self.learner.resize(config, log=self.log))
            catch_out_of_memory("update", lambda: self._set_base(model.wait()))
        self._tokens = tokens

    def programs(self, model: LoadingModel | OpenedModel) -> list[str]:
        """See `ModelActor`."""
        from pipeline.compute.learner.programs import LearnerPrograms

        if self.config.plan.micro_batch_tokens == self._tokens:
            return []
        return list(LearnerPrograms(model.policy, self.config, model.vocabulary).programs)

    def _set_base(self, opened: OpenedModel) -> None:
        """Sets the base of learner and exporter, which share the scoring programs."""
        self.learner.base = opened.base
        self.exporter = make_exporter(opened, self.config, score=self.learner.score)

    @logs(lambda _, found: f"restored {'nothing' if found.meta is None else found.meta['step']}")
    def restore(self) -> Restored:
        """Restores the newest usable checkpoint, if there is one.

        Raises:
            ValueError: if all checkpoints are damaged, or the teacher has changed.
            OSError: if a checkpoint cannot be read now.
            OutOfMemory: if a checkpoint does not fit into memory.
        """
        where = f"{RunFolder.of(self.config).checkpoints} on host {socket.gethostname()}"
        with self.phases.during("checkpoint"):
            found = catch_out_of_memory(
                "load", lambda: self.checkpoints.restore(self.learner.state)
            )
        if found is None:
            return Restored(None, where=where)
        self.learner.state, meta, damaged = found
        now = self.learner.teacher_sha256
        before = meta.pop("teacher_sha256", now)
        if before != now:
            raise ValueError(
                f"learner.teacher: {self.config.learner.teacher} has changed since this run "
                f"started: its hash is {now}, it was {before}; restore the former adapter, or "
                "start a run with another run.name"
            )
        return Restored(meta, tuple(damaged), where)

    @logs(lambda _, found: f"published version {found[0][0]} of the adapter")
    @during("publish")
    def publish(self, *, which: AdapterRef) -> tuple[tuple[int, str], Mapping[str, np.ndarray]]:
        """Returns version and hash of an adapter, and the adapter as host arrays.

        Raises:
            FileNotFoundError: if `which` is "best" and no best adapter was saved.
            OutOfMemory: if the adapter does not fit into memory.
        """
        import jax

        from pipeline.compute.model import lora

        adapter, version = self.adapter_of(which)
        payload = jax.device_get(adapter)
        return (version, lora.sha256(payload)), payload

    @logs(lambda _, scored: f"scored {len(scored)} rollouts")
    @during("score")
    def score(self, completions: Sequence[Completion], *, which: AdapterRef) -> list[np.ndarray]:
        """Returns the log-probs of the completions' tokens.

        Raises:
            OutOfMemory: if a micro-batch does not fit into memory.
        """
        adapter, _ = self.adapter_of(which)
        self.check_fits(lambda: self.learner.needs["score"])
        return self.learner.score(completions, adapter=adapter)

    def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        """See `pipeline.compute.learner.learner.Learner.sft_update`.

        Raises:
            OutOfMemory: if a micro-batch does not fit into memory; the state is unchanged.
        """
        return self._update(lambda: self.learner.sft_update(sequences))

    def update(
        self,
        rollouts: Sequence[Rollout],
        *,
        rate: float | None = None,
        lr: float | None = None,
        kl_coef: float | None = None,
    ) -> dict[str, float]:
        """See `pipeline.compute.learner.learner.Learner.update`.

        Raises:
            OutOfMemory: if a micro-batch does not fit into memory; the state is unchanged.
        """
        return self._update(
            lambda: self.learner.update(rollouts, rate=rate, lr=lr, kl_coef=kl_coef)
        )

    @logs(
        lambda actor, metrics: (
            f"updated to version {actor.learner.state.version}: "
            f"{metrics['tokens_trained']:,.0f} tokens, loss {metrics.get('loss', math.nan):.4g},"
        )
    )
    def _update(self, work: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Runs an update such that running out of memory neither loses nor changes the state.

        See invariant 11 of the design.

        Raises:
            OutOfMemory: see `update`.
            RuntimeError: if the state was lost nevertheless; resume from the last checkpoint.
        """
        learner = self.learner
        state_before = learner.state
        # A second update on the same batch, or the start of the next phase, may run out of memory
        # after the first update was applied; the retry must not apply that one twice.
        several_parts = self.config.learner.updates_per_batch > 1 or learner.ends_phase
        host_state = learner.host_state() if several_parts else None

        def check_and_update() -> dict[str, float]:
            self.check_fits(lambda: self.learner.needs["update"])
            return work()

        try:
            with self.phases.during("update"):
                metrics = catch_out_of_memory("update", check_and_update)
                self.phases.set_spare(metrics["padded_share"])
                return metrics
        except OutOfMemory as error:
            if host_state is not None:
                learner.restore_state(host_state)
            elif learner.state is not state_before or not learner.state.is_intact:
                raise RuntimeError(f"adapter and optimizer were lost: {error}") from None
            raise

    @logs(
        lambda actor, _: f"measured micro-batches of {actor.config.plan.micro_batch_tokens} tokens"
    )
    @during("update")
    def learner_speed(self) -> Speeds:
        """See `pipeline.compute.learner.learner.Learner.speed`.

        Raises:
            OutOfMemory: if a micro-batch does not fit into memory.
        """
        self.check_fits(lambda: self.learner.needs["update"])
        return self.learner.speed()

    def needs(self) -> dict[str, int]:
        """See `ModelActor`; of scoring and training."""
        return {**self.learner.needs["score"], **self.learner.needs["update"]}

    @logs(lambda actor, _: f"copied version {actor.learner.state.version} for its checkpoint")
    def save(self, meta: Mapping[str, Any]) -> None:
        """See `pipeline.contracts.workers.Learner`."""
        with self.phases.during("checkpoint"):
            self.checkpoints.save(
                self.learner.state, {**meta, "teacher_sha256": self.learner.teacher_sha256}
            )

    def saved(self, *, wait: bool) -> float | None:
        """See `pipeline.contracts.workers.Learner`."""
        if wait:
            with self.phases.during("checkpoint"):
                self.checkpoints.wait()
        return self.checkpoints.saved()

    @logs(lambda actor, _: f"keeps version {actor.learner.state.version} as the best one")
    def keep_best(self) -> None:
        """See `pipeline.contracts.workers.Learner`."""
        state = self.learner.state
        with self.phases.during("checkpoint"):
            copy = {name: np.array(value) for name, value in state.adapter.items()}
            self.checkpoints.keep_best(copy, version=state.version)

    def recover_best(self, version: int, sha256: str) -> BestFile:
        """See `pipeline.contracts.workers.Learner`; recovers from checkpoints or the export."""
        import jax

        from pipeline.compute.model import lora
        from pipeline.compute.model.adapter_file import read_adapter_file, write_adapter_file
        from pipeline.compute.model.adapter_source import load_adapter

        folder = RunFolder.of(self.config)
        self.checkpoints.wait()
        with suppress(FileNotFoundError, ValueError):
            adapter, found = read_adapter_file(self._best)
            if (found, lora.sha256(adapter)) == (version, sha256):
                return "whole"
        move_to_superseded(folder.path, [self._best])

        def load(source: Path) -> Params:
            return load_adapter(str(source), self.learner.policy).adapter

        for source in (
            partial(load, folder.checkpoints / str(version)),
            partial(load, folder.export),
            self.learner.initial_adapter,
        ):
            with suppress(FileNotFoundError, ValueError):
                adapter = jax.device_get(source())
                if lora.sha256(adapter) == sha256:
                    write_adapter_file(self._best, adapter, version=version)
                    return "recovered"
        return "lost"

    @logs(lambda _, report: f"exported version {report.version} to {report.folder}")
    @during("export")
    def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        """See `pipeline.compute.learner.export.Exporter.export`.

        Raises:
            OutOfMemory: if the export does not fit into memory; the folder is unchanged.
        """
        from pipeline.compute.learner.export import Tuned

        tuned = Tuned(*self.adapter_of(which))
        return self.exporter.export(Path(folder), tuned, examples=examples)

    @property
    def _best(self) -> Path:
        return RunFolder.of(self.config).checkpoints / BEST

    def adapter_of(self, which: AdapterRef) -> tuple[Params, int]:
        """Returns an adapter on the devices, and its version."""
        learner = self.learner
        if which == "probe":
            return learner.policy.probe_adapter(self.config.run.seed), PROBE_VERSION
        if which == "current":
            return learner.state.adapter, learner.state.version
        if which == "initial":
            return learner.initial_adapter(), 0
        if which == "previous":
            assert learner.state.previous is not None
            return learner.state.previous, learner.state.version - 1
        from pipeline.compute.model.adapter_file import read_adapter_file

        self.checkpoints.wait()
        adapter, version = read_adapter_file(self._best)
        return learner.policy.place_adapter(adapter), version
