"""Loaded splits: prompts, excluded rows, and the exclusion of overlaps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from configs.task import MIXTURE_TRAIN, HeldOut
from pipeline.data.demonstrations import LoadedDemonstrations
from pipeline.data.rows import Malformed, TooLong, list_rows
from pipeline.types import Prompt

MIXTURE_PREFIX, EVAL_SET_PREFIX = "mixture.", "sets."
"""Prefixes of the names of mixture sources and evaluation sets in `LoadedData.splits`."""


@dataclass(frozen=True)
class LoadedSplit:
    """A split's prompts in the dataset's order, and the rows that were excluded.

    Attributes:
        duplicates: number of prompts that repeat an earlier prompt and answer; they are kept.
        overlaps: number of prompts excluded because a later split has them too.
        held_out: whether it is a share of `data.train`.
    """

    prompts: tuple[Prompt, ...]
    malformed: tuple[Malformed, ...]
    too_long: tuple[TooLong, ...]
    duplicates: int
    overlaps: int = 0
    held_out: bool = False

    @property
    def without_answer(self) -> str | None:
        """How many prompts have no reference answer, in words; None: all have one."""
        count = sum(prompt.answer is None for prompt in self.prompts)
        if not count:
            return None
        columns = sorted({name for prompt in self.prompts for name in prompt.row})
        return (
            f"{count} of {len(self.prompts)} prompts have no reference answer; name its column "
            f"with data.answer_column (of {columns})"
        )


@dataclass(frozen=True)
class LoadedData:
    """All data of a run; training and evaluation data share no prompt text.

    Attributes:
        train: the training prompts of all sources.
        sets: the evaluation sets by name, evaluated like the test split.
        sources: the parts of `train` by source.
        weights: share of each source in the training prompts, with sum 1.
        sft: the demonstrations of the SFT phase, if there is one.
    """

    train: LoadedSplit
    validation: LoadedSplit | None
    test: LoadedSplit
    sets: Mapping[str, LoadedSplit] = field(default_factory=dict)
    sources: Mapping[str, LoadedSplit] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    sft: LoadedDemonstrations | None = None

    @property
    def fingerprints(self) -> dict[str, str]:
        """A hash of each source and split: prompt ids, tokens and reference answers."""
        found = {name: fingerprint(split) for name, split in self.splits()}
        return found | ({"sft": self.sft.fingerprint} if self.sft else {})

    @property
    def report(self) -> tuple[str, ...]:
        """A line for each source and split, each with lines for its first 10 malformed rows."""
        titles = {
            f"{name}: {len(split.prompts)} prompts" + " of data.train" * split.held_out: split
            for name, split in self.splits()
        }
        lines = [line for title, split in titles.items() for line in report_lines(title, split)]
        if self.sft is not None:
            count = len(self.sft.demonstrations)
            lines += report_lines(f"sft: {count} demonstrations", self.sft)
        return tuple(lines)

    def splits(self) -> Iterator[tuple[str, LoadedSplit]]:
        """All sources and splits with unique names, training first."""
        for name, split in (self.sources or {MIXTURE_TRAIN: self.train}).items():
            yield name if name == MIXTURE_TRAIN else MIXTURE_PREFIX + name, split
        if self.validation is not None:
            yield "validation", self.validation
        yield "test", self.test
        for name, split in self.sets.items():
            yield EVAL_SET_PREFIX + name, split


def concatenate(splits: Sequence[LoadedSplit]) -> LoadedSplit:
    """The splits as one; rows of different splits may have the same number."""
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
    """The split without the prompts of later splits; ValueError if none is left."""
    excluded = prompt_texts(later)
    kept = tuple(prompt for prompt in split.prompts if prompt.text not in excluded)
    if not kept:
        raise ValueError(f"{where}: a later split contains all {len(split.prompts)} prompts")
    return replace(split, prompts=kept, overlaps=len(split.prompts) - len(kept))


def hold_out(train: LoadedSplit, wanted: Mapping[str, HeldOut]) -> dict[str, LoadedSplit]:
    """Divides the training data, by a hash of the rows: equal rows are in one split.

    `wanted` has shares of the rows, and limits, by the names of the splits. Returns these, and what
    is left of `train`.

    Raises:
        ValueError: if a split would have no row.
    """
    keys = [_row_key(prompt.row) for prompt in train.prompts]
    order, split_of = sorted(set(keys)), dict[str, str]()
    if len(order) <= len(wanted):
        raise ValueError(
            f"data.train: {len(order)} different rows are too few to hold out "
            f"{' and '.join(f'data.{name}' for name in wanted)}"
        )
    for name, held in wanted.items():
        count = max(1, round((held.share or 0) * len(order)))
        first = len(split_of)
        for key in order[first : first + min(count, held.limit or count)]:
            split_of[key] = name
    if len(split_of) == len(order):
        raise ValueError(f"data.train: no row is left besides {' and '.join(wanted)}")
    prompts: dict[str, list[Prompt]] = {name: [] for name in (MIXTURE_TRAIN, *wanted)}
    for key, prompt in zip(keys, train.prompts, strict=True):
        prompts[split_of.get(key, MIXTURE_TRAIN)].append(prompt)
    return {
        name: LoadedSplit(tuple(own), (), (), repeated(own), held_out=True)
        if name in wanted
        else replace(train, prompts=tuple(own), duplicates=repeated(own))
        for name, own in prompts.items()
    }


def repeated(prompts: Sequence[Prompt]) -> int:
    """Number of prompts that repeat an earlier prompt and answer."""
    return len(prompts) - len({(prompt.text, prompt.answer) for prompt in prompts})


def _row_key(row: Mapping[str, object]) -> str:
    """A hash of a row; the prompt's template has no part in it."""
    text = json.dumps(row, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def prompt_texts(splits: Sequence[LoadedSplit]) -> frozenset[str]:
    """The texts of all prompts."""
    return frozenset(prompt.text for split in splits for prompt in split.prompts)


def fingerprint(split: LoadedSplit) -> str:
    """A hash of the split: prompt ids, tokens and reference answers."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in split.prompts:
        digest.update(repr((prompt.id, prompt.tokens.tolist(), prompt.answer)).encode())
    return digest.hexdigest()


def report_lines(title: str, loaded: LoadedSplit | LoadedDemonstrations) -> Iterator[str]:
    """A line with the counts of excluded rows, and one for each of the first 10 malformed rows."""
    counts = {
        "malformed": len(loaded.malformed),
        "too long": len(loaded.too_long),
        "in a later split": loaded.overlaps,
    }
    excluded = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    kept = loaded.duplicates
    yield (
        title
        + (f", excluded: {excluded}" if excluded else "")
        + (f", duplicates kept: {kept}" if kept else "")
    )
    yield from list_rows(loaded.malformed)
