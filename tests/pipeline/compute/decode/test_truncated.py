"""Top-k, top-p and min-p in the engine: sampled tokens and recorded log-probs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests import tiny
from tests.pipeline.compute.decode.reference import generate, recompute

LIMITS: dict[str, Any] = {"top_k": 12, "top_p": 0.8, "min_p": 0.1}


def left(scores: np.ndarray) -> np.ndarray:
    """Log-probs of one position renormalised after `LIMITS`, computed with a sort."""
    ranked = np.sort(scores)[::-1][: LIMITS["top_k"]]
    mass = np.cumsum(np.exp(ranked)) / np.exp(ranked).sum()
    last = ranked[np.flatnonzero(mass >= LIMITS["top_p"])[0]]
    kept = scores >= max(last, ranked[0] + np.log(LIMITS["min_p"]))
    return np.where(kept, scores - np.log(np.exp(scores[kept]).sum()), -np.inf)


def test_truncation_equals_a_sort_and_records_both_log_probs():
    completions = generate(tiny.engine(rollout=LIMITS))
    expected = recompute(completions)
    sizes, moved = set(), 0
    for completion, (logprobs, noisy) in zip(completions, expected, strict=True):
        assert completion.processed_logprobs is not None
        assert completion.processed_logprobs.dtype == np.float32
        kept = np.array([left(scores) for scores in logprobs])
        tokens = np.where(kept > -np.inf, noisy, -np.inf).argmax(axis=1)
        np.testing.assert_array_equal(completion.tokens, tokens)
        at = np.arange(len(tokens)), tokens
        np.testing.assert_allclose(completion.logprobs, logprobs[at], rtol=0, atol=1e-5)
        np.testing.assert_allclose(completion.processed_logprobs, kept[at], rtol=0, atol=1e-5)
        sizes |= set((kept > -np.inf).sum(axis=1).tolist())
        moved += int((tokens != noisy.argmax(axis=1)).sum())
    # Truncation changes the sampled tokens, and leaves sets of many sizes.
    assert moved > 20
    assert len(sizes) > 5
