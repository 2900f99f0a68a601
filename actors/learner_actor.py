"""The learner's process: one base, the learner, its checkpoints and exports."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.model_actor import ModelActor, Role, during, make_exporter
from configs.schema import Config
from pipeline.compute.device_memory import catch_out_of_memory
from pipeline.compute.opening import OpenedModel
from pipeline.data.packed_batch import PackedRow
from pipeline.plan.sizes import WorkerPhase
from pipeline.run.checkpoint_files import BEST, adapter_sha256
from pipeline.run.record_files import DamagedFileError
from pipeline.run.run_folder import RunFolder
from pipeline.types import AdapterRef, Completion, ExportReport, Restored, Rollout

if TYPE_CHECKING:
    from pipeline.compute.learner.checkpoint import Checkpoints
    from pipeline.compute.learner.export import Exporter
    from pipeline.compute.learner.learner import Learner
    from pipeline.compute.model.policy import Params

PROBE_VERSION = -1
"""Version of the random adapter that the mismatch check uses."""


class LearnerActor(ModelActor):
    """Hosts the learner; see `pipeline.protocols.Learner`. Out of memory raises `OutOfMemory`."""

    role: Role = "learner"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.learner: Learner
        self.exporter: Exporter
        self.checkpoints: Checkpoints
        self._tokens: int | None = None

    def open(self, model: OpenedModel) -> None:
        """See `ModelActor`."""
        from pipeline.compute.learner.checkpoint import Checkpoints
        from pipeline.compute.learner.learner import Learner

        config, tokens = self.config, self.config.plan.micro_batch_tokens
        if not hasattr(self, "learner"):
            self.learner = self.compile(
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
            catch_out_of_memory("load", model.loading.result)
            self._set_base(model)
            self.checkpoints = Checkpoints(
                RunFolder.of(config).checkpoints,
                keep=config.checkpoint.keep,
                keep_every=config.checkpoint.keep_every,
            )
        elif tokens != self._tokens:
            self._tokens = None  # no programs exist unless resizing succeeds
            self.compile("update", lambda: self.learner.resize(config, log=self.log))
            self._set_base(model)
        self._tokens = tokens

    def programs(self, model: OpenedModel) -> list[str]:
        """See `ModelActor`."""
        from pipeline.compute.learner.programs import LearnerPrograms

        if self.config.plan.micro_batch_tokens == self._tokens:
            return []
        return list(LearnerPrograms(model.policy, self.config, model.vocabulary).programs)

    def _set_base(self, opened: OpenedModel) -> None:
        """Sets the base of learner and exporter, which share the scoring programs."""
        self.learner.base = opened.base
        self.exporter = make_exporter(opened, self.config, score=self.learner.score)

    def restore(self) -> Restored:
        """Restores the newest checkpoint, if there is one.

        Raises:
            ValueError: if it cannot be read, or the teacher has changed.
        """
        where = f"{RunFolder.of(self.config).checkpoints} on host {socket.gethostname()}"
        with self.phases.during("checkpoint"):
            found = catch_out_of_memory(
                "load", lambda: self.checkpoints.restore(self.learner.state)
            )
        if found is None:
            return Restored(None, where=where)
        self.learner.state, meta = found
        now = self.learner.teacher_sha256
        before = meta.pop("teacher_sha256", now)
        if before != now:
            raise ValueError(
                f"learner.teacher: {self.config.learner.teacher} has changed since this run "
                f"started: its hash is {now}, it was {before}; restore the former adapter, or "
                "start a run with another run.name"
            )
        return Restored(meta, where)

    @during("publish")
    def publish(self, *, which: AdapterRef) -> tuple[tuple[int, str], Mapping[str, np.ndarray]]:
        """Returns version and hash of an adapter, and the adapter as host arrays.

        Raises:
            FileNotFoundError: if `which` is "best" and no best adapter was saved.
        """
        import jax

        from pipeline.compute.model import lora

        adapter, version = self.adapter_of(which)
        payload = jax.device_get(adapter)
        return (version, lora.sha256(payload)), payload

    @during("score")
    def score(self, completions: Sequence[Completion], *, which: AdapterRef) -> list[np.ndarray]:
        """Returns the log-probs of the completions' tokens."""
        adapter, _ = self.adapter_of(which)
        return self.learner.score(completions, adapter=adapter)

    @during("update")
    def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        """See `pipeline.compute.learner.learner.Learner.sft_update`."""
        return self.learner.sft_update(sequences)

    @during("update")
    def update(self, rollouts: Sequence[Rollout], *, rate: float | None = None) -> dict[str, float]:
        """See `pipeline.compute.learner.learner.Learner.update`."""
        return self.learner.update(rollouts, rate=rate)

    @during("update")
    def micro_batch_s(self) -> float:
        """See `pipeline.compute.learner.learner.Learner.micro_batch_s`."""
        return self.learner.micro_batch_s()

    def needs(self) -> dict[WorkerPhase, dict[str, int]]:
        """See `ModelActor`; of scoring and training."""
        return {"update": self.learner.needs}

    def save(self, meta: Mapping[str, Any]) -> None:
        """See `pipeline.protocols.Learner`."""
        with self.phases.during("checkpoint"):
            self.checkpoints.save(
                self.learner.state, {**meta, "teacher_sha256": self.learner.teacher_sha256}
            )

    def saved(self, *, wait: bool) -> float | None:
        """See `pipeline.protocols.Learner`."""
        if wait:
            with self.phases.during("checkpoint"):
                self.checkpoints.wait()
        return self.checkpoints.saved()

    def keep_best(self) -> None:
        """See `pipeline.protocols.Learner`."""
        state = self.learner.state
        with self.phases.during("checkpoint"):
            copy = {name: np.array(value) for name, value in state.adapter.items()}
            self.checkpoints.keep_best(copy, version=state.version)

    def recover_best(self, version: int, sha256: str) -> None:
        """See `pipeline.protocols.Learner`; a kill may come before the file is replaced."""
        import jax

        from pipeline.compute.model.adapter_file import write_adapter_file
        from pipeline.compute.model.adapter_source import load_adapter

        self.checkpoints.wait()
        if adapter_sha256(self._best) == sha256:
            return
        checkpoint = self._best.with_name(str(version))
        if adapter_sha256(checkpoint) != sha256:
            raise DamagedFileError(
                f"{self._best} is not the best version by validation, that of step {version}, and "
                f"{checkpoint} is gone; put one of them back, or start another run with "
                "--run.fork RUN@STEP"
            )
        adapter = jax.device_get(load_adapter(str(checkpoint), self.learner.policy).adapter)
        write_adapter_file(self._best, adapter, version=version)

    @during("export")
    def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        """See `pipeline.compute.learner.export.Exporter.export`."""
        adapter, version = self.adapter_of(which)
        return self.exporter.export(Path(folder), adapter, version=version, examples=examples)

    @property
    def _best(self) -> Path:
        return self.checkpoints.folder / BEST

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
