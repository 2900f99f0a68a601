"""What a run will read, for people: lengths, exact tokens, repetitions, what stands in two splits.

Text in, lines out; knows nothing of files or terminals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from configs.schema import Rollout
from pipeline.contracts.rollouts import Demonstration, Prompt
from pipeline.inputs.dataset.demonstrations import LoadedDemonstrations
from pipeline.inputs.dataset.splits import LoadedSplit
from pipeline.inputs.text.tokenizer import Tokenizer

_BINS = 10
_SHOWN = 5
_BAR = "#"


class Inspector:
    """Looks at all that a run will read.

    Args:
        rollout: the lengths that are allowed.
        tokenizer: the model's.
        show: prompts of each split that are shown token by token.
        width: of the terminal.
    """

    def __init__(self, rollout: Rollout, tokenizer: Tokenizer, *, show: int, width: int) -> None:
        self._rollout = rollout
        self._tokenizer = tokenizer
        self._show = show
        self._width = width

    def splits(self, splits: Mapping[str, LoadedSplit]) -> Iterator[str]:
        """First prompts, lengths, repetitions, overlaps: before any prompt is taken out."""
        tokenizer, width = self._tokenizer, self._width
        for name, split in splits.items():
            for prompt in split.prompts[: self._show]:
                yield from prompt_lines(name, prompt, tokenizer=tokenizer, width=width)
                yield ""
        for name, split in splits.items():
            lengths = [len(prompt.tokens) for prompt in split.prompts]
            lengths += [row.tokens for row in split.too_long]
            title, limit = f"{name}, tokens of the prompts", self._rollout.max_prompt_tokens
            yield from histogram(title, lengths, limit=limit, width=width)
            yield answer_lengths(name, split, tokenizer=tokenizer)
            yield ""
        repeated = [line for name, split in splits.items() for line in repetitions(name, split)]
        yield from repeated or ["no prompt stands twice in a split"]
        yield ""
        yield from overlap_table(splits)
        yield ""

    def examples(self, loaded: LoadedDemonstrations) -> Iterator[str]:
        """First worked examples, lengths."""
        tokenizer, width = self._tokenizer, self._width
        for example in loaded.examples[: self._show]:
            yield from example_lines(example, tokenizer=tokenizer, width=width)
            yield ""
        lengths = [len(example) for example in loaded.examples]
        lengths += [row.tokens for row in loaded.too_long]
        title, limit = "sft, tokens of the examples", self._rollout.max_tokens
        yield from histogram(title, lengths, limit=limit, width=width)
        yield ""

    def shares(self, weights: Mapping[str, float]) -> Iterator[str]:
        """What a mixture's weights come to."""
        size = self._rollout.prompts_per_step
        for name, share in weights.items():
            yield f"{name}: {share:.1%} of the prompts, on average {size * share:.4g} of {size}"


def histogram(title: str, lengths: Sequence[int], *, limit: int, width: int) -> Iterator[str]:
    """Lengths in at most ten classes of equal width up to `limit`, and one above it.

    Args:
        title: what was counted.
        lengths: how long each is.
        limit: longer ones are left out.
        width: of the terminal.
    """
    values = np.array(lengths)
    low, high = int(values.min()), int(min(values.max(), limit))
    yield (
        f"{title}: {_numbers(lengths)}; limit {limit}"
        + (f", {int((values > limit).sum())} above it" if values.max() > limit else "")
    )
    step = max(1, -(-(high - low + 1) // _BINS))
    edges = [*range(low, high + 1, step), high + 1] if low <= high else []
    classes = [
        (f"{a}-{b - 1}" if b - a > 1 else f"{a}", int(((values >= a) & (values < b)).sum()))
        for a, b in pairwise(edges)
    ]
    if values.max() > limit:
        classes.append((f"above {limit}", int((values > limit).sum())))
    most = max(count for _, count in classes)
    names, counts = (max(len(str(one[n])) for one in classes) for n in (0, 1))
    room = max(width - names - counts - 4, 1)
    for name, count in classes:
        bar = _BAR * max(round(room * count / most), 1 if count else 0)
        yield f"  {name:>{names}} {count:>{counts}} {bar}".rstrip()


def tokens_of(tokens: np.ndarray, *, tokenizer: Tokenizer, width: int) -> Iterator[str]:
    """The tokens as `id=piece`, in lines of at most `width` characters where pieces allow it."""
    line = "   "
    for token in tokens.tolist():
        # As Python writes it: line ends and odd characters are seen, spaces are what they are.
        piece = repr(tokenizer.piece(token))[1:-1]
        word = f" {token}={piece}"
        if line.strip() and len(line) + len(word) > width:
            yield line
            line = "   "
        line += word
    yield line


def prompt_lines(name: str, prompt: Prompt, *, tokenizer: Tokenizer, width: int) -> Iterator[str]:
    """One prompt as the model sees it, with its row and its reference answer."""
    yield f"{name}, prompt {prompt.id}: {len(prompt.tokens)} tokens, answer {prompt.answer!r}"
    for column, value in prompt.row.items():
        text = f"  {column}: {value!r}"
        yield text if len(text) <= width else f"{text[: width - 4]} ..."
    yield "  reads:"
    yield from tokens_of(prompt.tokens, tokenizer=tokenizer, width=width)


def example_lines(example: Demonstration, *, tokenizer: Tokenizer, width: int) -> Iterator[str]:
    """One worked example as the model sees it."""
    yield f"sft, example {example.id}: {len(example)} tokens"
    yield "  reads:"
    yield from tokens_of(example.prompt_tokens, tokenizer=tokenizer, width=width)
    yield "  learns to write:"
    yield from tokens_of(example.completion_tokens, tokenizer=tokenizer, width=width)


def answer_lengths(name: str, split: LoadedSplit, *, tokenizer: Tokenizer) -> str:
    """How long the reference answers are."""
    lengths = [len(tokenizer.encode(prompt.answer)) for prompt in split.prompts]
    return f"{name}, tokens of the reference answers: {_numbers(lengths)}"


def repetitions(name: str, split: LoadedSplit) -> Iterator[str]:
    """Prompts that stand twice in a split, and whether their answers agree."""
    by_text: dict[str, list[Prompt]] = {}
    for prompt in split.prompts:
        by_text.setdefault(prompt.text, []).append(prompt)
    repeated = [group for group in by_text.values() if len(group) > 1]
    agreeing = [group for group in repeated if len({prompt.answer for prompt in group}) == 1]
    for what, groups in (
        ("one answer", agreeing),
        ("different answers", [group for group in repeated if group not in agreeing]),
    ):
        if groups:
            rows = ["=".join(str(prompt.id) for prompt in group) for group in groups[:_SHOWN]]
            more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
            found = f"{len(groups)} prompts stand there again with {what}"
            yield f"{name}: {found}: {', '.join(rows)}{more}"


def overlap_table(splits: Mapping[str, LoadedSplit]) -> Iterator[str]:
    """For each split how many of its prompts stand in each other one, before any is taken out."""
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
