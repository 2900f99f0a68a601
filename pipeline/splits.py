"""The splits of a dataset: prompts, what was left out and why, and what stands in two splits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.datatypes import Prompt
from pipeline.rows import DataError, Malformed

SHOWN_ROWS = 10


@dataclass(frozen=True)
class LoadedSplit:
    """A split's prompts and what became of its other rows.

    Attributes:
        prompts: in the dataset's order.
        malformed: rows that cannot be used.
        too_long: numbers of the rows whose prompts are longer than `rollout.max_prompt_tokens`.
        duplicates: prompts that repeat an earlier one, answer included; they are kept.
        overlaps: prompts taken out because a later split has them too.
    """

    prompts: tuple[Prompt, ...]
    malformed: tuple[Malformed, ...]
    too_long: tuple[int, ...]
    duplicates: int
    overlaps: int = 0


@dataclass(frozen=True)
class LoadedData:
    """The splits, disjoint by prompt text."""

    train: LoadedSplit
    validation: LoadedSplit | None
    test: LoadedSplit

    @property
    def overlaps(self) -> int:
        """Prompts taken out of a split because a later one has them too."""
        return sum(split.overlaps for _, split in self._splits())

    @property
    def fingerprints(self) -> dict[str, str]:
        """For each split a hash of its prompts: ids, tokens and reference answers."""
        return {name: _fingerprint(split) for name, split in self._splits()}

    @property
    def report(self) -> tuple[str, ...]:
        """A line for each split and for each malformed row, at most 10 rows a split."""
        return tuple(line for name, split in self._splits() for line in _report_lines(name, split))

    def _splits(self) -> Iterator[tuple[str, LoadedSplit]]:
        yield "train", self.train
        if self.validation is not None:
            yield "validation", self.validation
        yield "test", self.test


def _fingerprint(split: LoadedSplit) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in split.prompts:
        digest.update(repr((prompt.id, prompt.tokens.tolist(), prompt.answer)).encode())
    return digest.hexdigest()


def without_overlaps(split: LoadedSplit, later: Sequence[LoadedSplit], *, name: str) -> LoadedSplit:
    """The split without the prompts that stand in later ones."""
    taken = {prompt.text for other in later for prompt in other.prompts}
    kept = tuple(prompt for prompt in split.prompts if prompt.text not in taken)
    if not kept:
        raise DataError(f"data.{name}: all {len(split.prompts)} prompts stand in a later split too")
    return replace(split, prompts=kept, overlaps=len(split.prompts) - len(kept))


def list_rows(malformed: Sequence[Malformed]) -> Iterator[str]:
    """A line for each of the first 10 rows and one for the others."""
    for bad in malformed[:SHOWN_ROWS]:
        yield f"  row {bad.row}: {bad.reason}"
    if len(malformed) > SHOWN_ROWS:
        yield f"  and {len(malformed) - SHOWN_ROWS} more"


def _report_lines(name: str, split: LoadedSplit) -> Iterator[str]:
    counts = {
        "malformed": len(split.malformed),
        "too long": len(split.too_long),
        "in a later split": split.overlaps,
    }
    left_out = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    yield (
        f"{name}: {len(split.prompts)} prompts"
        + (f", left out: {left_out}" if left_out else "")
        + (f", duplicates kept: {split.duplicates}" if split.duplicates else "")
    )
    yield from list_rows(split.malformed)
