"""The exporter's process: one base, one adapter, and the programs that verify an export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actors.model_actor import make_exporter
from configs.model import Format
from configs.schema import Config
from pipeline.compute.opening import open_model
from pipeline.types import Completion, ExportReport
from rewards.processes.parent import end_with_parent

if TYPE_CHECKING:
    from pipeline.compute.learner.export import Exporter
    from pipeline.compute.model.adapter_source import LoadedAdapter


class ExporterActor:
    """Exports one checkpoint; a plain class that `actors.groups` runs as a Ray actor.

    `config.lora.start` is the adapter, `described` the run's configuration, for the model card.
    Without examples, whose log-probs are compared, nothing is verified.
    """

    def __init__(self, config: Config, described: Config, examples: Sequence[Completion]) -> None:
        end_with_parent()
        self.config, self.described = config, described
        self.examples = examples
        self.exporter: Exporter
        self.loaded: LoadedAdapter

    def start(self) -> str:
        """Opens devices, model and adapter, compiles; returns a description of the adapter.

        Raises:
            ValueError: if devices, weights or adapter do not match the configuration.
            FileNotFoundError: if weights or adapter are missing.
        """
        opened = open_model(self.config, role="learner")
        from pipeline.compute.model.adapter_source import load_adapter

        assert self.config.lora.start is not None
        self.loaded = load_adapter(self.config.lora.start, opened.policy)
        self.exporter = make_exporter(opened, self.config, described=self.described)
        return self.loaded.what

    def export(self, folder: str, formats: Sequence[Format]) -> ExportReport:
        """See `pipeline.compute.learner.export.Exporter.export`."""
        return self.exporter.export(
            Path(folder),
            self.loaded.adapter,
            version=self.loaded.version,
            examples=self.examples,
            formats=formats,
        )
