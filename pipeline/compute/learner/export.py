"""Exports the trained policy in standard formats, and verifies each export by loading it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from configs.model import FORMATS, Format
from configs.schema import Config
from pipeline.compute.learner.model_card import base_name, model_card
from pipeline.compute.learner.scorer import Scorer
from pipeline.compute.model import lora, peft_folder, save, weights
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.projections import to_pairs
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.data.models.hf_config import is_multimodal
from pipeline.data.models.hf_folder import is_multimodal_folder, read_config
from pipeline.data.text.exported import (
    check_exported,
    write_chat_template,
    write_unigram_json,
)
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.run.record_files import replace_folder, unwritten
from pipeline.types import Completion, ExportReport

ADAPTER = "adapter"
"""Folder of the PEFT adapter inside an export."""
SHARD_BYTES = 2**32
"""Maximum size of a file of weights."""
BOUND = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
"""Mean log-prob difference between policy and export, by the coarser of their dtypes. In bfloat16 a
single improbable token of Gemma 3 270m differs by 0.6 through rounding alone."""


class Score(Protocol):
    """Log-probs of each completion's tokens under a base and an adapter."""

    def __call__(
        self, completions: Sequence[Completion], *, adapter: Params, base: Params
    ) -> list[np.ndarray]:
        """See the class."""


def merged(
    policy: Policy, base: Params, adapter: Params, *, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Base plus adapter in host memory, one parameter after another."""
    for name, value in policy.parameters(base):
        exact = lora.merge(name, value, adapter, lora=policy.lora)
        yield name, np.asarray(exact.astype(dtype))


class Exporter:
    """Writes exports of one base and its adapters, and verifies them by loading.

    The programs for verification are compiled at construction, so that an export compiles nothing.
    Verification holds the unquantized merged model on the devices besides the base; if memory does
    not suffice, it compares the written parameters with the policy's instead.

    Args:
        policy: the model.
        base: its frozen parameters.
        config: of the run.
        vocabulary: special token ids.
        like: the folder of the base.
        tokenizer: the tokenizer's file.
        score: scores under `policy`, if that is compiled already.
        described: the configuration in the model card, if it is a different one.
        evaluations: reads the `evaluated` entries of the run's journal, for the model card.
        reader: the run's tokenizer, whose token ids transformers must read from an export; None: of
            no matter.
    """

    def __init__(
        self,
        policy: Policy,
        base: Params,
        config: Config,
        vocabulary: Vocabulary,
        *,
        like: Path,
        tokenizer: Path,
        score: Score | None = None,
        described: Config | None = None,
        evaluations: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
        reader: Tokenizer | None = None,
    ) -> None:
        self.policy, self.base, self.config = policy, base, config
        self.like, self.tokenizer = like, tokenizer
        self.dtype = config.export.dtype or config.model.dtype
        self._described = described or config
        self._evaluations = evaluations
        self._reader = reader
        self._is_read = False
        self._stops = vocabulary.stops
        # Users of an export do not quantize activations either.
        unrounded = policy.unrounded()
        if score is None or unrounded is not policy:
            score = Scorer(unrounded, config, vocabulary).score
        self._score = score
        # The export is not quantized, and must not be quantized when it is loaded.
        self._plain = policy.plain()
        self._score_plain = (
            Scorer(self._plain, config, vocabulary).score if policy.is_quantized else self._score
        )

    def export(
        self,
        folder: Path,
        adapter: Params,
        *,
        version: int,
        examples: Sequence[Completion],
        formats: Sequence[Format] = ("hf", "peft"),
    ) -> ExportReport:
        """Writes beside `folder`, verifies, and only then replaces `folder`.

        Args:
            folder: path of the export.
            adapter: on the devices.
            version: number of steps it was trained for.
            examples: completions whose log-probs are compared.
            formats: formats to write.

        Raises:
            RuntimeError: if the export cannot be loaded, or scores tokens differently; `folder`
                does not change.
            OSError: if the disk is full; `folder` does not change.
        """
        fresh = _begin(folder)
        with _naming(fresh):
            found = [
                self._add(fresh, kind, adapter, examples=examples)
                for kind in FORMATS
                if kind in formats
            ]
            self._finish(fresh, folder, version=version, formats=formats)
        scored = [difference for difference in found if difference is not None]
        if len(scored) < len(found):
            return ExportReport(str(folder), None, 0, version)
        tokens = sum(len(completion.tokens) for completion in examples)
        return ExportReport(str(folder), max(scored), tokens, version)

    def _add(
        self, fresh: Path, kind: Format, adapter: Params, *, examples: Sequence[Completion]
    ) -> float | None:
        """Writes one format into `fresh` and verifies it.

        Returns the largest log-prob difference; None if there was not enough memory to score.
        """
        if kind == "peft":
            self._write_adapter(fresh / ADAPTER, adapter)
            return self._check_adapter(fresh / ADAPTER, adapter)
        parameters = merged(self.policy, self.base, adapter, dtype=self.dtype)
        within = self.like if is_multimodal_folder(self.like) else None
        config = read_config(within) if within else weights.read_text_config(self.like)
        save.copy_companions(
            fresh, like=self.like, tokenizer=self.tokenizer, multimodal=within is not None
        )
        save.save_config(fresh, config, dtype=self.dtype)
        save.add_stop_tokens(fresh, stops=self._stops)
        if self._reader is not None and self.tokenizer.suffix == ".model":
            write_unigram_json(fresh, model=self.tokenizer)
        if self._reader and not self._reader.chat_template and self.config.prompt.turn != "plain":
            write_chat_template(fresh, self._reader.turns)
        reader = None if self._is_read else self._reader
        with ThreadPoolExecutor(max_workers=1) as beside:
            # Beside the weights: importing transformers and building its tokenizer take seconds.
            checked = None if reader is None else beside.submit(check_exported, fresh, reader)
            if kind == "hf":
                save.save_weights(
                    fresh,
                    parameters,
                    shapes={name: spec.shape for name, spec in self.policy.plain_shapes.items()},
                    dtype=self.dtype,
                    shard_bytes=SHARD_BYTES,
                    within=within,
                )
            else:
                save.save_flax(fresh, parameters)
            difference = self._check_merged(fresh, adapter, examples)
            if checked is not None:
                checked.result()
                self._is_read = True  # later exports have the same files
        return difference

    def _finish(
        self, fresh: Path, folder: Path, *, version: int, formats: Sequence[Format]
    ) -> None:
        """Adds the model card of this version and replaces `folder` with `fresh`."""
        card = model_card(
            self._described,
            step=version,
            formats=formats,
            kind=weights.read_text_config(self.like)["model_type"],
            dtype=self.dtype,
            multimodal=self._multimodal,
            evaluations=self._evaluations(),
        )
        (fresh / "README.md").write_text(card, encoding="utf-8")
        replace_folder(folder, fresh)

    @property
    def _multimodal(self) -> bool:
        return (self.like / "config.json").is_file() and is_multimodal(read_config(self.like))

    def _write_adapter(self, folder: Path, adapter: Params) -> None:
        base, revision = base_name(self.config.model.path)
        peft_folder.write_peft(
            folder,
            to_pairs(adapter),
            lora=self.policy.lora,
            base=base,
            revision=revision,
            layers=peft_folder.MULTIMODAL if self._multimodal else peft_folder.TEXT,
        )

    def _check_adapter(self, folder: Path, adapter: Params) -> float:
        found = peft_folder.fit_to_policy(peft_folder.read_peft(folder), self.policy)
        if lora.sha256(found) != lora.sha256(adapter):
            raise RuntimeError(f"the adapter in {folder} differs from the exported one")
        return 0.0

    def _check_merged(
        self, fresh: Path, adapter: Params, examples: Sequence[Completion]
    ) -> float | None:
        if self.policy.embeddings_in_host:  # to score, each device needs a second copy of them
            self._compare_parameters(fresh, adapter)
            return None
        trained = self._score(examples, adapter=adapter, base=self.base)
        try:
            reloaded = self._score_plain(
                examples, adapter=self.policy.no_adapter(), base=self._plain.load_base(fresh)
            )
        except ValueError as error:
            raise RuntimeError(
                f"the export in {fresh} cannot be loaded, with export.dtype = {self.dtype}: {error}"
            ) from error
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._compare_parameters(fresh, adapter)
            return None
        difference = float(np.abs(np.concatenate(reloaded) - np.concatenate(trained)).mean())
        bound = max(BOUND[self.dtype], BOUND[self.config.model.dtype])
        if not difference <= bound:
            raise RuntimeError(
                f"the export in {fresh} scores tokens differently from the policy: by "
                f"{difference:.3g} on average, allowed {bound:g}"
            )
        return difference

    def _compare_parameters(self, fresh: Path, adapter: Params) -> None:
        written = merged(self.policy, self.base, adapter, dtype=self.dtype)
        read = weights.stream(fresh, self.policy.plain_params())
        for (name, value), (_, found) in zip(written, read, strict=True):
            if not np.array_equal(value.astype(found.dtype), found):
                raise RuntimeError(f"the export in {fresh} does not hold the policy's {name}")


def _begin(folder: Path) -> Path:
    """An empty folder beside `folder` to write into; deletes the one of a dead process."""
    fresh = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    return fresh


@contextmanager
def _naming(fresh: Path) -> Iterator[None]:
    """Deletes what does not fit on a full disk; Python's error does not name it.

    Raises:
        OSError: with the name of the folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        shutil.rmtree(fresh, ignore_errors=True)
        raise unwritten(fresh, error) from None
