"""Exports the trained policy in the formats of others, and proves each by loading it back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from configs.schema import Config
from pipeline.compute.learner.exchange import exchange
from pipeline.compute.learner.model_card import base_name, model_card
from pipeline.compute.learner.scorer import Scorer
from pipeline.compute.model import lora, peft_folder, save, weights
from pipeline.compute.model.peft_fit import fit
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.projections import to_pairs
from pipeline.compute.model.sharding import placed
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.adapters import FORMATS, ExportReport, Format
from pipeline.contracts.rollouts import Completion
from pipeline.inputs.hub.hf_config import is_multimodal
from pipeline.inputs.hub.hf_folder import read_config

ADAPTER = "adapter"
"""Folder of the PEFT adapter inside an export."""
BOUND = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.25}
"""Largest log-prob difference between policy and export, by the coarser of the types of both."""
_GIB = 2**30


class Score(Protocol):
    """Log-probs of each completion's tokens under a base and an adapter."""

    def __call__(
        self, completions: Sequence[Completion], *, adapter: Params, base: Params
    ) -> list[np.ndarray]:
        """See the class."""


@dataclass(frozen=True)
class Tuned:
    """What is exported: an adapter, and the number of steps it was trained for."""

    adapter: Params
    version: int


def merged(
    policy: Policy, base: Params, adapter: Params, *, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Base plus adapter in host memory, one parameter after the other.

    Raises:
        ValueError: if a number is too large for `dtype`.
    """
    for name, value in policy.parameters(base):
        whole = lora.merge(name, value, adapter, lora=policy.lora)
        kept = whole.astype(dtype)
        if dtype == "float16" and bool(jnp.any(jnp.isinf(kept) & jnp.isfinite(whole))):
            largest = float(jnp.abs(whole).max())
            raise ValueError(
                f'export.dtype = "float16" ends at 65504 and {name} has {largest:.4g}; '
                'nearest valid: "bfloat16"'
            )
        yield name, np.asarray(kept)


class Exporter:
    """Writes exports of one base and its adapters, and loads them back.

    What verification needs is compiled here, so that an export compiles nothing. It holds the
    unquantized merged model on the devices, beside the base; where there is no room for that, what
    was written is read back and compared number by number instead.

    Args:
        policy: the model.
        base: its frozen parameters.
        config: of the run.
        vocabulary: token ids with a meaning.
        like: the folder the base came from.
        tokenizer: the tokenizer's file.
        score: scores under `policy`, if that is compiled already.
        verify: whether exports are to be verified at all.
        described: the configuration in the model card, if it is another one.
        evaluations: reads the `evaluated` entries of the run's journal, for the model card.
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
        verify: bool = True,
        described: Config | None = None,
        evaluations: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
    ) -> None:
        self.policy, self.base, self.config = policy, base, config
        self.like, self.tokenizer = like, tokenizer
        self.dtype = config.export.dtype or config.model.dtype
        self._verify = verify
        self._described = described or config
        self._evaluations = evaluations
        self._stops = vocabulary.stops
        if verify:
            # Nor are activations rounded where an export is used.
            unrounded = policy.unrounded()
            if score is None or unrounded is not policy:
                score = Scorer(unrounded, config, vocabulary).score
            self._score = score
            # What is written is not quantized, and is not to be when it is loaded back.
            self._plain = policy.plain()
            self._score_plain = (
                Scorer(self._plain, config, vocabulary).score
                if policy.is_quantized
                else self._score
            )

    def export(
        self,
        folder: Path,
        tuned: Tuned,
        *,
        examples: Sequence[Completion],
        formats: Sequence[Format] = ("hf", "peft"),
    ) -> ExportReport:
        """Writes beside `folder`, verifies, and only then replaces what is there.

        Args:
            folder: where the export will be.
            tuned: what is exported.
            examples: completions whose log-probs are compared.
            formats: what is written.

        Raises:
            RuntimeError: if what is loaded back scores tokens differently; `folder` is left as it
                was.
            ValueError: if a number is too large for `export.dtype`; likewise.
        """
        fresh = begin(folder)
        found = [
            self.add(fresh, kind, tuned, examples=examples) for kind in FORMATS if kind in formats
        ]
        self.finish(fresh, folder, tuned, formats=formats)
        scored = [difference for difference in found if difference is not None]
        if not self._verify or len(scored) < len(found):
            return ExportReport(str(folder), None, 0, tuned.version)
        tokens = sum(len(drawn.tokens) for drawn in examples)
        return ExportReport(str(folder), max(scored), tokens, tuned.version)

    def add(
        self, fresh: Path, kind: Format, tuned: Tuned, *, examples: Sequence[Completion]
    ) -> float | None:
        """Writes one format into `fresh` and loads it back.

        Returns:
            The largest log-prob difference; None where nothing was scored, for want of room.

        Raises:
            RuntimeError: if that is too large, or the adapter is not the one that was written.
            ValueError: if a number is too large for `export.dtype`.
        """
        if kind == "peft":
            self._write_adapter(fresh / ADAPTER, tuned)
            return self._check_adapter(fresh / ADAPTER, tuned) if self._verify else 0.0
        parameters = merged(self.policy, self.base, tuned.adapter, dtype=self.dtype)
        config = weights.read_text_config(self.like)
        save.copy_companions(fresh, like=self.like, tokenizer=self.tokenizer)
        save.save_config(fresh, config, dtype=self.dtype)
        save.add_stop_tokens(fresh, stops=self._stops)
        if kind == "hf":
            save.save_weights(
                fresh,
                parameters,
                shapes={name: spec.shape for name, spec in self.policy.plain_shapes.items()},
                dtype=self.dtype,
                shard_bytes=int(self.config.export.shard_gib * _GIB),
            )
        else:
            save.save_flax(fresh, parameters)
        return self._check_merged(fresh, tuned, examples) if self._verify else 0.0

    def finish(self, fresh: Path, folder: Path, tuned: Tuned, *, formats: Sequence[Format]) -> None:
        """Adds the model card and puts `fresh` in the place of `folder`."""
        card = model_card(
            self._described,
            step=tuned.version,
            formats=formats,
            dtype=self.dtype,
            multimodal=self._multimodal,
            evaluations=self._evaluations(),
        )
        (fresh / "README.md").write_text(card, encoding="utf-8")
        replace(fresh, folder)

    @property
    def _multimodal(self) -> bool:
        return (self.like / "config.json").is_file() and is_multimodal(read_config(self.like))

    def _write_adapter(self, folder: Path, tuned: Tuned) -> None:
        base, revision = base_name(self.config.model.path)
        peft_folder.write_peft(
            folder,
            to_pairs(tuned.adapter),
            lora=self.policy.lora,
            base=base,
            revision=revision,
            layers=peft_folder.MULTIMODAL if self._multimodal else peft_folder.TEXT,
        )

    def _check_adapter(self, folder: Path, tuned: Tuned) -> float:
        found = fit(peft_folder.read_peft(folder), self.policy)
        if lora.sha256(found) != lora.sha256(tuned.adapter):
            raise RuntimeError(f"the adapter in {folder} is not the one that was to be written")
        return 0.0

    def _check_merged(
        self, fresh: Path, tuned: Tuned, examples: Sequence[Completion]
    ) -> float | None:
        trained = self._score(examples, adapter=tuned.adapter, base=self.base)
        try:
            reloaded = self._score_plain(
                examples, adapter=self.policy.no_adapter(), base=self._plain.load_base(fresh)
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._compare_parameters(fresh, tuned)
            return None
        difference = float(np.abs(np.concatenate(reloaded) - np.concatenate(trained)).max())
        bound = max(BOUND[self.dtype], BOUND[self.config.model.dtype])
        if not difference <= bound:
            raise RuntimeError(
                f"the export in {fresh} scores tokens differently from the policy: "
                f"{difference:.3g}, allowed {bound:g}"
            )
        return difference

    def _compare_parameters(self, fresh: Path, tuned: Tuned) -> None:
        written = merged(self.policy, self.base, tuned.adapter, dtype=self.dtype)
        kept = weights.stream(fresh, placed(self.policy.plain_shapes, self.policy.mesh))
        for (name, value), (_, found) in zip(written, kept, strict=True):
            if not np.array_equal(value.astype(found.dtype), found):
                raise RuntimeError(f"the export in {fresh} does not hold the policy's {name}")


def begin(folder: Path) -> Path:
    """An empty folder beside `folder` to write into; what a dead process left there is deleted."""
    fresh = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    return fresh


def replace(fresh: Path, folder: Path) -> None:
    """Puts `fresh` in the place of `folder`: there is the old or the new one at any time."""
    if folder.exists():
        exchange(fresh, folder)
        shutil.rmtree(fresh)
    else:
        fresh.rename(folder)
    # What a process left that died between two of the renames of `exchange`.
    shutil.rmtree(folder.with_name(folder.name + ".old"), ignore_errors=True)
