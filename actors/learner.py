"""The learner's process: one base, the learner, its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.opening import OpenedModel, open_model
from configs.schema import Config
from pipeline.data.packing import Packed
from pipeline.datatypes import Completion, ExportReport, Restored, Rollout, Which
from pipeline.model_files.model_source import find_model
from pipeline.run_dir import RunFolder
from pipeline.text.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from pipeline.learner.checkpoint import Checkpoints
    from pipeline.learner.export import Exporter
    from pipeline.learner.learner import Learner
    from pipeline.model.policy import Params

PROBE_VERSION = -1


class LearnerActor:
    """A plain class; `actors.handles` makes a Ray actor of it.

    JAX is imported in `start`, so that the driver can name this class without starting JAX.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.learner: Learner
        self.exporter: Exporter
        self.checkpoints: Checkpoints

    def start(self) -> float:
        """Opens devices and model, compiles; returns the seconds that loading took.

        Raises:
            ValueError: if devices, weights or tokenizer are not what the configuration says.
            FileNotFoundError: if weights or tokenizer are not there.
        """
        opened = open_model(self.config, which="learner")
        self.learn(opened)
        return opened.load_s

    def learn(self, opened: OpenedModel) -> None:
        """Makes the learner on a model that is open already."""
        from pipeline.learner.checkpoint import Checkpoints
        from pipeline.learner.export import Exporter
        from pipeline.learner.learner import Learner

        config = self.config
        self.learner = Learner(opened.policy, opened.base, config, opened.vocabulary)
        self.exporter = Exporter(
            opened.policy,
            opened.base,
            config,
            opened.vocabulary,
            like=find_model(config.model),
            tokenizer=open_tokenizer(config.model).path,
            score=self.learner.score,
        )
        folder = RunFolder.of(config)
        self.checkpoints = Checkpoints(folder.checkpoints, keep=config.checkpoint.keep)

    def restore(self) -> Restored:
        """Goes on from the newest usable checkpoint, if there is one.

        Raises:
            ValueError: if there are checkpoints and none of them can be used, or the teacher is
                another than before.
        """
        found = self.checkpoints.restore(self.learner.state)
        if found is None:
            return Restored(None)
        self.learner.state, meta, damaged = found
        now = self.learner.teacher_sha256
        before = meta.pop("teacher_sha256", now)
        if before != now:
            raise ValueError(
                f"learner.teacher: {self.config.learner.teacher} is no longer the adapter that "
                f"this run learned from: its hash is {now}, it was {before}; put the former one "
                "back, or start a run of another name"
            )
        return Restored(meta, tuple(damaged))

    def publish(self, *, which: Which) -> tuple[tuple[int, str], Mapping[str, np.ndarray]]:
        """Version and hash of an adapter, and the adapter.

        Raises:
            FileNotFoundError: if the best one is asked for and none was kept.
        """
        import jax

        from pipeline.model import lora

        adapter, version = self._adapter(which)
        payload = jax.device_get(adapter)
        return (version, lora.sha256(payload)), payload

    def score(self, completions: Sequence[Completion], *, which: Which) -> list[np.ndarray]:
        """Log-probs of the completions' tokens."""
        return self.learner.score(completions, adapter=self._adapter(which)[0])

    def imitate(self, sequences: Sequence[Packed]) -> dict[str, float]:
        """See `pipeline.learner.learner.Learner.imitate`."""
        return self.learner.imitate(sequences)

    def update(self, rollouts: Sequence[Rollout], *, rate: float | None = None) -> dict[str, float]:
        """See `pipeline.learner.learner.Learner.update`."""
        return self.learner.update(rollouts, rate=rate)

    def save(self, meta: Mapping[str, Any]) -> None:
        """Writes a checkpoint of the current version."""
        self.checkpoints.save(
            self.learner.state, {**meta, "teacher_sha256": self.learner.teacher_sha256}
        )

    def keep_best(self) -> None:
        """Keeps the current adapter as the best so far, beside the checkpoints."""
        from pipeline.model.adapter_file import write_adapter_file

        state = self.learner.state
        write_adapter_file(self._best, self.learner.host_adapter(), version=state.version)

    def export(self, folder: str, examples: Sequence[Completion], *, which: Which) -> ExportReport:
        """See `pipeline.learner.export.Exporter.export`."""
        from pipeline.learner.export import Tuned

        tuned = Tuned(*self._adapter(which))
        return self.exporter.export(Path(folder), tuned, examples=examples)

    @property
    def _best(self) -> Path:
        return RunFolder.of(self.config).checkpoints / "best"

    def _adapter(self, which: Which) -> tuple[Params, int]:
        """An adapter and its version."""
        learner = self.learner
        if which == "probe":
            return learner.policy.probe_adapter(self.config.run.seed), PROBE_VERSION
        if which == "current":
            return learner.state.adapter, learner.state.version
        from pipeline.model.adapter_file import read_adapter_file

        adapter, version = read_adapter_file(self._best)
        return learner.policy.place_adapter(adapter), version
