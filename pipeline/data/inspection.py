"""Describes a run's data for the user: exact tokens of first prompts, and lengths.

Functions return lines of text; they access neither files nor terminals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from configs.schema import Rollout
from pipeline.data.demonstrations import LoadedDemonstrations
from pipeline.data.splits import LoadedSplit
from pipeline.data.text.tokenizer import Tokenizer


def split_lines(
    name: str, split: LoadedSplit, *, rollout: Rollout, tokenizer: Tokenizer, width: int
) -> Iterator[str]:
    """The first prompt token by token, with its row and reference answer; lengths of all prompts.

    `rollout` has the length limits; `width` is that of the terminal in characters.
    """
    first = split.prompts[0]
    answer = "no reference answer" if first.answer is None else f"answer {first.answer!r}"
    yield f"{name}, prompt {first.id}: {len(first.tokens)} tokens, {answer}"
    texts = [f"  {column}: {value!r}" for column, value in first.row.items()]
    texts += [f"  {one['role']}> {one['content']!r}" for one in first.messages or ()]
    yield from (text if len(text) <= width else f"{text[: width - 4]} ..." for text in texts)
    yield "  prompt tokens:"
    yield from _token_lines(first.tokens, tokenizer=tokenizer, width=width)
    lengths = [len(prompt.tokens) for prompt in split.prompts]
    lengths += [row.tokens for row in split.too_long]
    yield f"{name}, tokens of the prompts: {_measured(lengths, limit=rollout.max_prompt_tokens)}"


def demonstration_lines(
    loaded: LoadedDemonstrations, *, rollout: Rollout, tokenizer: Tokenizer, width: int
) -> Iterator[str]:
    """The first demonstration token by token, and lengths of all; as `split_lines`."""
    first = loaded.demonstrations[0]
    yield f"sft, demonstration {first.id}: {len(first)} tokens"
    for what, tokens in (("prompt", first.prompt_tokens), ("completion", first.completion_tokens)):
        yield f"  {what} tokens:"
        yield from _token_lines(tokens, tokenizer=tokenizer, width=width)
    lengths = [len(one) for one in loaded.demonstrations]
    lengths += [row.tokens for row in loaded.too_long]
    yield f"sft, tokens of the demonstrations: {_measured(lengths, limit=rollout.max_tokens)}"


def _token_lines(tokens: np.ndarray, *, tokenizer: Tokenizer, width: int) -> Iterator[str]:
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


def _measured(lengths: Sequence[int], *, limit: int) -> str:
    values = np.array(lengths)
    above = int((values > limit).sum())
    return (
        f"{len(values)} of {values.min()} to {values.max()}, median {np.median(values):g}, "
        f"99% at most {int(np.quantile(values, 0.99, method='inverted_cdf'))}; limit {limit}"
        + (f", {above} above it" if above else "")
    )
