"""The splits of a dataset: prompts, what was left out and why, and what stands in two splits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from configs.task import MIXTURE_TRAIN
from pipeline.contracts.rollouts import Prompt
from pipeline.inputs.dataset.demonstrations import LoadedDemonstrations
from pipeline.inputs.dataset.rows import DataError, Malformed, TooLong, report_lines

MIXED, SETS = "mixture.", "sets."
"""What the names of mixed-in sources and of evaluation sets begin with where all stand together."""


@dataclass(frozen=True)
class LoadedSplit:
    """A split's prompts and what became of its other rows.

    Attributes:
        prompts: in the dataset's order.
        malformed: rows that cannot be used.
        too_long: rows whose prompts are longer than `rollout.max_prompt_tokens`.
        duplicates: prompts that repeat an earlier one, answer included; they are kept.
        overlaps: prompts taken out because a later split has them too.
    """

    prompts: tuple[Prompt, ...]
    malformed: tuple[Malformed, ...]
    too_long: tuple[TooLong, ...]
    duplicates: int
    overlaps: int = 0


@dataclass(frozen=True)
class LoadedData:
    """Everything that a run reads; what is measured shares no prompt text with what is learned.

    Attributes:
        train: the training prompts of all sources.
        validation: watched during training.
        test: read once before and once after.
        sets: the evaluation sets by name, read like the test split.
        sources: the parts of `train` by source; empty stands for one source.
        weights: share of each source in the training prompts; they sum to 1, and empty stands for
            one source.
        sft: the examples of the supervised phase, if there is one.
    """

    train: LoadedSplit
    validation: LoadedSplit | None
    test: LoadedSplit
    sets: Mapping[str, LoadedSplit] = field(default_factory=dict)
    sources: Mapping[str, LoadedSplit] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    sft: LoadedDemonstrations | None = None

    @property
    def overlaps(self) -> int:
        """Prompts and examples taken out because something that is measured has them too."""
        prompts = sum(split.overlaps for _, split in self.splits())
        return prompts + (self.sft.overlaps if self.sft else 0)

    @property
    def fingerprints(self) -> dict[str, str]:
        """For each source and split a hash of its prompts: ids, tokens and reference answers."""
        found = {name: fingerprint(split) for name, split in self.splits()}
        return found | ({"sft": self.sft.fingerprint} if self.sft else {})

    @property
    def report(self) -> tuple[str, ...]:
        """A line for each source and split and for each malformed row, at most 10 rows of each."""
        lines = [line for name, split in self.splits() for line in _report(name, split)]
        return (*lines, *(self.sft.report if self.sft else ()))

    def splits(self) -> Iterator[tuple[str, LoadedSplit]]:
        """All sources and splits by name, training first; no two names are alike."""
        for name, split in (self.sources or {MIXTURE_TRAIN: self.train}).items():
            yield name if name == MIXTURE_TRAIN else MIXED + name, split
        if self.validation is not None:
            yield "validation", self.validation
        yield "test", self.test
        for name, split in self.sets.items():
            yield SETS + name, split


def joined(splits: Sequence[LoadedSplit]) -> LoadedSplit:
    """The splits as one; rows of different sources may have one number."""
    return LoadedSplit(
        prompts=tuple(prompt for split in splits for prompt in split.prompts),
        malformed=tuple(bad for split in splits for bad in split.malformed),
        too_long=tuple(row for split in splits for row in split.too_long),
        duplicates=sum(split.duplicates for split in splits),
        overlaps=sum(split.overlaps for split in splits),
    )


def without_overlaps(
    split: LoadedSplit, later: Sequence[LoadedSplit], *, where: str
) -> LoadedSplit:
    """The split without the prompts that stand in later ones.

    Raises:
        DataError: if none is left.
    """
    taken = texts(later)
    kept = tuple(prompt for prompt in split.prompts if prompt.text not in taken)
    if not kept:
        raise DataError(f"{where}: all {len(split.prompts)} prompts stand in a later split too")
    return replace(split, prompts=kept, overlaps=len(split.prompts) - len(kept))


def texts(splits: Sequence[LoadedSplit]) -> frozenset[str]:
    """The texts of all their prompts."""
    return frozenset(prompt.text for split in splits for prompt in split.prompts)


def fingerprint(split: LoadedSplit) -> str:
    """A hash of the split's prompts: ids, tokens and reference answers."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in split.prompts:
        digest.update(repr((prompt.id, prompt.tokens.tolist(), prompt.answer)).encode())
    return digest.hexdigest()


def _report(name: str, split: LoadedSplit) -> Iterator[str]:
    return report_lines(
        f"{name}: {len(split.prompts)} prompts",
        malformed=split.malformed,
        too_long=len(split.too_long),
        overlaps=split.overlaps,
        duplicates=split.duplicates,
    )
