"""Describes a run's data for the user: lengths, exact tokens, duplicates, overlaps of splits.

Functions return lines of text; they access neither files nor terminals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

import numpy as np

from configs.schema import Rollout
from pipeline.data.demonstrations import LoadedDemonstrations
from pipeline.data.splits import LoadedSplit
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.types import Prompt

_BINS = 10
_SHOWN = 5
_BAR = "#"


@dataclass(frozen=True)
class Inspector:
    """Describes the data of a run.

    Attributes:
        rollout: has the length limits.
        tokenizer: the model's tokenizer.
        width: width of the terminal in characters.
    """

    rollout: Rollout
    tokenizer: Tokenizer
    _: KW_ONLY
    width: int

    def splits(self, splits: Mapping[str, LoadedSplit]) -> Iterator[str]:
        """First prompts, lengths, duplicates and overlaps, before overlaps are excluded."""
        for name, split in splits.items():
            for prompt in split.prompts[:1]:
                yield from prompt_lines(name, prompt, tokenizer=self.tokenizer, width=self.width)
                yield ""
        for name, split in splits.items():
            lengths = [len(prompt.tokens) for prompt in split.prompts]
            lengths += [row.tokens for row in split.too_long]
            title, limit = f"{name}, tokens of the prompts", self.rollout.max_prompt_tokens
            yield from histogram(title, lengths, limit=limit, width=self.width)
            yield answer_lengths(name, split, tokenizer=self.tokenizer)
            yield ""
        repeated = [line for name, split in splits.items() for line in repetitions(name, split)]
        yield from repeated or ["no split contains a prompt twice"]
        yield ""
        yield from overlap_table(splits)
        yield ""

    def demonstrations(self, loaded: LoadedDemonstrations) -> Iterator[str]:
        """First demonstrations, and lengths."""
        for one in loaded.demonstrations[:1]:
            yield f"sft, demonstration {one.id}: {len(one)} tokens"
            for what, tokens in (
                ("prompt", one.prompt_tokens),
                ("completion", one.completion_tokens),
            ):
                yield f"  {what} tokens:"
                yield from token_lines(tokens, tokenizer=self.tokenizer, width=self.width)
            yield ""
        lengths = [len(one) for one in loaded.demonstrations]
        lengths += [row.tokens for row in loaded.too_long]
        title, limit = "sft, tokens of the demonstrations", self.rollout.max_tokens
        yield from histogram(title, lengths, limit=limit, width=self.width)
        yield ""

    def mixture_shares(self, weights: Mapping[str, float]) -> Iterator[str]:
        """Share of each source of the mixture, and its average number of prompts in a step."""
        size = self.rollout.prompts_per_step
        for name, share in weights.items():
            yield f"{name}: {share:.1%} of the prompts, on average {size * share:.4g} of {size}"


def histogram(title: str, lengths: Sequence[int], *, limit: int, width: int) -> Iterator[str]:
    """Histogram with at most ten bins of equal width up to `limit`, and one bin above it.

    Args:
        title: what the lengths measure.
        lengths: the values.
        limit: maximum allowed length.
        width: width of the terminal in characters.
    """
    values = np.array(lengths)
    low, high = int(values.min()), int(min(values.max(), limit))
    yield (
        f"{title}: {_numbers(lengths)}; limit {limit}"
        + (f", {int((values > limit).sum())} above it" if values.max() > limit else "")
    )
    step = max(1, -(-(high - low + 1) // _BINS))
    edges = [*range(low, high + 1, step), high + 1] if low <= high else []
    bins = [
        (f"{a}-{b - 1}" if b - a > 1 else f"{a}", int(((values >= a) & (values < b)).sum()))
        for a, b in pairwise(edges)
    ]
    if values.max() > limit:
        bins.append((f"above {limit}", int((values > limit).sum())))
    most = max(count for _, count in bins)
    name_width, count_width = (max(len(str(one[n])) for one in bins) for n in (0, 1))
    bar_width = max(width - name_width - count_width - 4, 1)
    for name, count in bins:
        bar = _BAR * max(round(bar_width * count / most), 1 if count else 0)
        yield f"  {name:>{name_width}} {count:>{count_width}} {bar}".rstrip()


def token_lines(tokens: np.ndarray, *, tokenizer: Tokenizer, width: int) -> Iterator[str]:
    """The tokens as `id=piece`, in lines of at most `width` characters if pieces are shorter."""
    line = "   "
    for token in tokens.tolist():
        # `repr` escapes line breaks and unprintable characters, and keeps spaces.
        piece = repr(tokenizer.piece(token))[1:-1]
        word = f" {token}={piece}"
        if line.strip() and len(line) + len(word) > width:
            yield line
            line = "   "
        line += word
    yield line


def prompt_lines(name: str, prompt: Prompt, *, tokenizer: Tokenizer, width: int) -> Iterator[str]:
    """One prompt token by token, with its row, its messages and its reference answer."""
    answer = "no reference answer" if prompt.answer is None else f"answer {prompt.answer!r}"
    yield f"{name}, prompt {prompt.id}: {len(prompt.tokens)} tokens, {answer}"
    texts = [f"  {column}: {value!r}" for column, value in prompt.row.items()]
    texts += [f"  {one['role']}> {one['content']!r}" for one in prompt.messages or ()]
    yield from (text if len(text) <= width else f"{text[: width - 4]} ..." for text in texts)
    yield "  prompt tokens:"
    yield from token_lines(prompt.tokens, tokenizer=tokenizer, width=width)


def answer_lengths(name: str, split: LoadedSplit, *, tokenizer: Tokenizer) -> str:
    """Lengths of the reference answers, and how many prompts have none."""
    answers = [prompt.answer for prompt in split.prompts if prompt.answer is not None]
    if not answers:
        return f"{name}: no reference answers"
    absent = len(split.prompts) - len(answers)
    return (
        f"{name}, tokens of the reference answers: "
        f"{_numbers([len(tokenizer.encode(answer)) for answer in answers])}"
        + (f"; {absent} prompts have none" if absent else "")
    )


def repetitions(name: str, split: LoadedSplit) -> Iterator[str]:
    """Repeated prompts of a split, grouped by whether their answers, if any, agree."""
    by_text: dict[str, list[Prompt]] = {}
    for prompt in split.prompts:
        by_text.setdefault(prompt.text, []).append(prompt)
    repeated = [group for group in by_text.values() if len(group) > 1]
    agreeing = [group for group in repeated if len({prompt.answer for prompt in group}) == 1]
    answered = any(prompt.answer is not None for prompt in split.prompts)
    for what, groups in (
        ("one answer" if answered else "no answer", agreeing),
        ("different answers", [group for group in repeated if group not in agreeing]),
    ):
        if groups:
            rows = ["=".join(str(prompt.id) for prompt in group) for group in groups[:_SHOWN]]
            more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
            found = f"{len(groups)} prompts are repeated with {what}"
            yield f"{name}: {found}: {', '.join(rows)}{more}"


def overlap_table(splits: Mapping[str, LoadedSplit]) -> Iterator[str]:
    """For each split, how many of its prompts each other split contains, before exclusion."""
    texts = {name: {prompt.text for prompt in split.prompts} for name, split in splits.items()}
    names = list(splits)
    first = max(map(len, [*names, "prompts of"]))
    yield "  ".join(["prompts of".ljust(first), *(f"in {name}" for name in names)])
    for name, split in splits.items():
        cells = [
            "-" if other == name else str(sum(p.text in texts[other] for p in split.prompts))
            for other in names
        ]
        padded = [cell.rjust(len(f"in {other}")) for cell, other in zip(cells, names, strict=True)]
        yield "  ".join([name.ljust(first), *padded])


def _numbers(lengths: Sequence[int]) -> str:
    values = np.array(lengths)
    return (
        f"{len(values)} of {values.min()} to {values.max()}, median {np.median(values):g}, "
        f"99% at most {int(np.quantile(values, 0.99, method='inverted_cdf'))}"
    )
