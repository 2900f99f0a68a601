"""Texts of a run on which an export and its policy are compared."""

from __future__ import annotations

import numpy as np

from pipeline.data.text.tokenizer import Tokenizer
from pipeline.run.run_folder import RunFolder
from pipeline.types import Completion, RolloutName, Segment

COUNT = 16
"""Number of completions whose log-probs an export has to reproduce."""


def recorded_examples(
    folder: RunFolder, tokenizer: Tokenizer, *, max_tokens: int
) -> tuple[Completion, ...]:
    """Texts that the run sampled, as completions of an empty prompt; none if it has none.

    Only their tokens are compared, up to `max_tokens`; log-probs and versions are placeholders.
    """
    steps = [f"step_{step:06d}" for step in reversed(folder.rollout_steps())]
    for name in ("test_after", "test_before", *steps):
        rows = folder.read_rollouts(name) if folder.rollouts_file(name).is_file() else ()
        texts = [row["text"] for row in rows if row["text"]][:COUNT]
        if texts:
            return tuple(
                _completion(number, tokenizer, tokenizer.encode(text)[: max_tokens - 1])
                for number, text in enumerate(texts)
            )
    return ()


def _completion(number: int, tokenizer: Tokenizer, tokens: np.ndarray) -> Completion:
    return Completion(
        name=RolloutName("export", 0, prompt_id=number, sample=0),
        prompt_tokens=np.asarray([tokenizer.bos_id], np.int32),
        segments=(Segment(tokens, np.zeros(len(tokens), np.float32), 0, ""),),
        stop_reason="length",
    )
