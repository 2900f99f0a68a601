"""The learner's process: one base, the learner, its checkpoints and exports."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from configs.schema import Config
from pipeline.compute.device_memory import catch_out_of_memory, memory_use
from pipeline.compute.opening import LoadingModel, OpenedModel, start_loading
from pipeline.compute.program_cache import share_programs
from pipeline.contracts.adapters import AdapterRef, BestFile, ExportReport, Restored
from pipeline.contracts.batches import PackedRow
from pipeline.contracts.builds import Building, BuildLog, Ready
from pipeline.contracts.memory import MemoryUse, OutOfMemory
from pipeline.contracts.record_files import move_to_superseded
from pipeline.contracts.rollouts import Completion, Rollout
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.speeds import Speeds
from pipeline.inputs.hub.model_source import find_model
from pipeline.inputs.text.tokenizer_files import open_tokenizer
from pipeline.run.run_folder import RunFolder

if TYPE_CHECKING:
    from pipeline.compute.learner.checkpoint import Checkpoints
    from pipeline.compute.learner.export import Exporter
    from pipeline.compute.learner.learner import Learner
    from pipeline.compute.model.policy import Params

PROBE_VERSION = -1
"""Version of the random adapter that the parity check uses."""


class LearnerActor:
    """Hosts the learner; a plain class that `actors.handles` runs as a Ray actor.

    JAX is imported in `prepare`, so that the driver can import this class without JAX.
    """

    def __init__(self, config: Config) -> None:
        self.requested = self.config = config
        self.log = BuildLog()
        self.opening: LoadingModel | None = None
        self.learner: Learner
        self.exporter: Exporter
        self.checkpoints: Checkpoints
        self._tokens: int | None = None

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
            self.opening = start_loading(self.config, role="learner")
        load_s = self.open_learner(self.opening)
        share_programs()
        return Ready(load_s, self.log.read().done[known:])

    def open_learner(self, model: LoadingModel | OpenedModel) -> float:
        """Compiles while the base is loaded; returns the seconds that loading took.

        Raises:
            OutOfMemory: if the configured sizes need too much memory.
        """
        from pipeline.compute.learner.checkpoint import Checkpoints
        from pipeline.compute.learner.learner import Learner

        config, tokens = self.config, self.config.plan.micro_batch_tokens
        if not hasattr(self, "learner"):
            self.learner = catch_out_of_memory(
                "update",
                lambda: Learner(model.policy, {}, config, model.vocabulary, log=self.log),
            )
            self._set_base(catch_out_of_memory("load", model.wait))
            folder = RunFolder.of(config)
            self.checkpoints = Checkpoints(folder.checkpoints, keep=config.checkpoint.keep)
        elif tokens != self._tokens:
            self._tokens = None  # no programs exist unless resizing succeeds
            catch_out_of_memory("update", lambda: self.learner.resize(config, log=self.log))
            catch_out_of_memory("update", lambda: self._set_base(model.wait()))
        self._tokens = tokens
        return model.wait().load_s

    def _set_base(self, opened: OpenedModel) -> None:
        """Sets the base of learner and exporter, which share the scoring programs."""
        from pipeline.compute.learner.export import Exporter

        config = self.config
        self.learner.base = opened.base
        self.exporter = Exporter(
            opened.policy,
            opened.base,
            config,
            opened.vocabulary,
            like=find_model(config.model),
            tokenizer=open_tokenizer(config.model).path,
            score=self.learner.score,
            evaluations=partial(RunFolder.of(config).valid_entries, "evaluated"),
        )

    def building(self) -> Building:
        """Returns the progress of compilation; can be called while `prepare` runs."""
        return self.log.read()

    def restore(self) -> Restored:
        """Restores the newest usable checkpoint, if there is one.

        Raises:
            ValueError: if all checkpoints are damaged, or the teacher has changed.
            OSError: if a checkpoint cannot be read now.
            OutOfMemory: if a checkpoint does not fit into memory.
        """
        where = f"{RunFolder.of(self.config).checkpoints} on host {socket.gethostname()}"
        found = catch_out_of_memory("load", lambda: self.checkpoints.restore(self.learner.state))
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

    def publish(self, *, which: AdapterRef) -> tuple[tuple[int, str], Mapping[str, np.ndarray]]:
        """Returns version and hash of an adapter, and the adapter as host arrays.

        Raises:
            FileNotFoundError: if `which` is "best" and no best adapter was saved.
            OutOfMemory: if the adapter does not fit into memory.
        """
        import jax

        from pipeline.compute.model import lora

        def fetch() -> tuple[tuple[int, str], Mapping[str, np.ndarray]]:
            adapter, version = self._adapter(which)
            payload = jax.device_get(adapter)
            return (version, lora.sha256(payload)), payload

        return catch_out_of_memory("publish", fetch)

    def score(self, completions: Sequence[Completion], *, which: AdapterRef) -> list[np.ndarray]:
        """Returns the log-probs of the completions' tokens.

        Raises:
            OutOfMemory: if a micro-batch does not fit into memory.
        """

        def work() -> list[np.ndarray]:
            adapter = self._adapter(which)[0]
            self._check_fits("score")
            return self.learner.score(completions, adapter=adapter)

        return catch_out_of_memory("score", work)

    def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        """See `pipeline.compute.learner.learner.Learner.sft_update`.

        Raises:
            OutOfMemory: if a micro-batch does not fit into memory; the state is unchanged.
        """
        return self._update(lambda: self.learner.sft_update(sequences))

    def update(self, rollouts: Sequence[Rollout], *, rate: float | None = None) -> dict[str, float]:
        """See `pipeline.compute.learner.learner.Learner.update`.

        Raises:
            OutOfMemory: if a micro-batch does not fit into memory; the state is unchanged.
        """
        return self._update(lambda: self.learner.update(rollouts, rate=rate))

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
            self._check_fits("update")
            return work()

        try:
            return catch_out_of_memory("update", check_and_update)
        except OutOfMemory as error:
            if host_state is not None:
                learner.restore_state(host_state)
            elif learner.state is not state_before or not learner.state.is_intact:
                raise RuntimeError(f"adapter and optimizer were lost: {error}") from None
            raise

    def _check_fits(self, what: Literal["score", "update"]) -> None:
        from pipeline.compute.device_memory import check_fits

        if self.config.plan.hbm_gib is not None:
            check_fits(self.learner.needs[what], hbm_gib=self.config.plan.hbm_gib)

    def learner_speed(self) -> Speeds:
        """See `pipeline.compute.learner.learner.Learner.speed`.

        Raises:
            OutOfMemory: if a micro-batch does not fit into memory.
        """

        def work() -> Speeds:
            self._check_fits("update")
            return self.learner.speed()

        return catch_out_of_memory("update", work)

    def memory(self) -> MemoryUse:
        """Returns the memory of scoring and training, as needed and as measured."""
        needs = self.learner.needs
        return memory_use({**needs["score"], **needs["update"]})

    def save(self, meta: Mapping[str, Any]) -> None:
        """Writes a checkpoint of the current version."""
        self.checkpoints.save(
            self.learner.state, {**meta, "teacher_sha256": self.learner.teacher_sha256}
        )

    def keep_best(self) -> None:
        """Saves the current adapter as the best so far, beside the checkpoints."""
        from pipeline.compute.model.adapter_file import write_adapter_file

        state = self.learner.state
        write_adapter_file(self._best, self.learner.host_adapter(), version=state.version)

    def recover_best(self, version: int, sha256: str) -> BestFile:
        """See `pipeline.contracts.workers.Learner`; recovers from checkpoints or the export."""
        import jax

        from pipeline.compute.model import lora
        from pipeline.compute.model.adapter_file import read_adapter_file, write_adapter_file
        from pipeline.compute.model.adapter_source import load_adapter

        folder = RunFolder.of(self.config)
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

    def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        """See `pipeline.compute.learner.export.Exporter.export`.

        Raises:
            OutOfMemory: if the export does not fit into memory; the folder is unchanged.
        """
        from pipeline.compute.learner.export import Tuned

        def work() -> ExportReport:
            tuned = Tuned(*self._adapter(which))
            return self.exporter.export(Path(folder), tuned, examples=examples)

        return catch_out_of_memory("export", work)

    @property
    def _best(self) -> Path:
        return RunFolder.of(self.config).checkpoints / "best"

    def _adapter(self, which: AdapterRef) -> tuple[Params, int]:
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

        adapter, version = read_adapter_file(self._best)
        return learner.policy.place_adapter(adapter), version
