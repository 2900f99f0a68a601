"""The exporter's process: one base, one adapter, and what verification compiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import Config
from pipeline.compute.opening import open_model
from pipeline.contracts.adapters import Format
from pipeline.contracts.rollouts import Completion
from pipeline.inputs.hub.model_source import find_model
from pipeline.inputs.text.tokenizer_files import open_tokenizer
from pipeline.run.run_folder import RunFolder

if TYPE_CHECKING:
    from pipeline.compute.learner.export import Exporter, Tuned


class ExporterActor:
    """A plain class; `actors.handles` makes a Ray actor of it.

    Args:
        config: how the model is opened and scored; `lora.start` is the adapter.
        described: the run's configuration, for the model card.
        examples: completions that are compared; none: nothing is verified.
    """

    def __init__(self, config: Config, described: Config, examples: Sequence[Completion]) -> None:
        self.config, self.described = config, described
        self.examples = examples
        self.exporter: Exporter
        self.tuned: Tuned
        self.fresh: Path

    def start(self) -> str:
        """Opens devices, model and adapter, compiles; returns what the adapter is.

        Raises:
            ValueError: if devices, weights or adapter are not what the configuration says.
            FileNotFoundError: if weights or adapter are not there.
        """
        opened = open_model(self.config, role="learner")
        from pipeline.compute.learner.export import Exporter, Tuned
        from pipeline.compute.model.adapter_source import load_adapter

        assert self.config.lora.start is not None
        loaded = load_adapter(self.config.lora.start, opened.policy)
        self.tuned = Tuned(loaded.adapter, loaded.version)
        self.exporter = Exporter(
            opened.policy,
            opened.base,
            self.config,
            opened.vocabulary,
            like=find_model(self.config.model),
            tokenizer=open_tokenizer(self.config.model).path,
            verify=bool(self.examples),
            described=self.described,
            evaluations=partial(RunFolder.of(self.described).standing, "evaluated"),
        )
        return loaded.what

    def begin(self, folder: str) -> None:
        """Makes the folder beside `folder` that is written into."""
        from pipeline.compute.learner.export import begin

        self.fresh = begin(Path(folder))

    def add(self, kind: Format) -> float | None:
        """See `pipeline.compute.learner.export.Exporter.add`."""
        return self.exporter.add(self.fresh, kind, self.tuned, examples=self.examples)

    def finish(self, folder: str, formats: Sequence[Format]) -> None:
        """See `pipeline.compute.learner.export.Exporter.finish`."""
        self.exporter.finish(self.fresh, Path(folder), self.tuned, formats=formats)
