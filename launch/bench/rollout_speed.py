"""Our rollout engine beside Tunix's sampler: useful tokens a second, equal greedy text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.bench.counting import compilations
from launch.bench.rollout_case import (
    GROUP,
    NEW,
    PROMPT,
    SLOTS,
    VOCABULARY,
    Case,
    make_lengths,
    make_requests,
)
from pipeline.compute.model.head import scaled_logits
from pipeline.contracts.rollouts import Completion, RolloutRequest

TIE = 1e-5
"""Logits closer than this may be ordered either way."""
_BATCHES = (1, 2, 4, 8, 16, 32)
"""Tried batch sizes of the peer; on a CPU the best is 4 or 8."""
_TRIED = 4
"""Rollouts per slot for choosing the peer's batch size, and the minimum for measuring."""


@dataclass(frozen=True)
class SamplingWork:
    """Work of sampling the rollouts of some steps.

    Attributes:
        tokens: useful tokens.
        computed: decode steps of all rows, finished ones included.
        prompt_tokens: prefilled positions, padding included.
    """

    tokens: int
    computed: int
    prompt_tokens: int


def speed(*, share: int, equal: bool, repeats: int) -> dict[str, Any]:
    """Returns useful tokens a second of both, alternating; the peer with its best batch size.

    Args:
        share: rollouts of a step per slot.
        equal: all rollouts have the largest length; otherwise lengths are lognormal.
        repeats: rounds; the median counts.
    """
    assert repeats > 0
    case = Case.make()
    count = SLOTS * max(share, _TRIED)
    requests = make_requests([NEW] * count if equal else make_lengths(count).tolist())
    steps = [requests[i : i + share * SLOTS] for i in range(0, count, share * SLOTS)]
    best = _best_batch(case, steps)

    def run_ours() -> SamplingWork:
        return ours(case, steps)

    def run_theirs() -> SamplingWork:
        return theirs(case, steps, batch=best)

    ours(case, steps[:1])
    with compilations() as compiled:
        (mine, ours_s), (peer, theirs_s) = _alternate(run_ours, run_theirs, repeats=repeats)
    assert mine.tokens == peer.tokens, (mine, peer)
    return {
        "rollouts": count,
        "steps": len(steps),
        "tokens": mine.tokens,
        "ours": mine.tokens / ours_s,
        "theirs": mine.tokens / theirs_s,
        "ratio": theirs_s / ours_s,
        "batch": best,
        "ours_useful": mine.tokens / mine.computed,
        "theirs_useful": peer.tokens / peer.computed,
        "ours_prompt": mine.prompt_tokens,
        "theirs_prompt": peer.prompt_tokens,
        "compiled": len(compiled),
    }


def ours(case: Case, steps: Sequence[Sequence[RolloutRequest]]) -> SamplingWork:
    """Samples the rollouts of each step with our engine."""
    tokens = computed = prompt_tokens = 0
    for step in steps:
        completions = _ours(case, step, temperature=1.0)
        lengths = [len(completion.tokens) for completion in completions]
        assert lengths == [request.max_new_tokens for request in step]
        work = case.engine.work
        tokens += work.tokens
        computed += work.slot_steps
        prompt_tokens += work.prompt_tokens
    return SamplingWork(tokens, computed, prompt_tokens)


def theirs(case: Case, steps: Sequence[Sequence[RolloutRequest]], *, batch: int) -> SamplingWork:
    """Samples them with Tunix's sampler, in static batches in their order."""
    tokens = computed = prompt_tokens = 0
    for step in steps:
        for first in range(0, len(step), batch):
            rows = step[first : first + batch]
            lengths = [request.max_new_tokens or NEW for request in rows]
            sampled, logprobs = case.peer.sample(
                [request.prompt_tokens for request in rows],
                new=max(lengths),
                temperature=1.0,
                seed=first,
            )
            excluded = (*VOCABULARY.forbidden, *VOCABULARY.stops)
            assert not np.isin(sampled, excluded).any()
            assert (logprobs < 0).all()
            tokens += sum(lengths)
            computed += sampled.size
            prompt_tokens += len(rows) * PROMPT
    return SamplingWork(tokens, computed, prompt_tokens)


def greedy(*, prompts: int) -> dict[str, Any]:
    """Counts different greedy tokens of both, and the difference of their log-probs.

    A row is compared up to its first different token: later tokens have different contexts.
    """
    case = Case.make()
    requests = make_requests([NEW] * GROUP * prompts)[::GROUP]
    mine = _ours(case, requests, temperature=0.0)
    given = [request.prompt_tokens for request in requests]
    tokens, logprobs = case.peer.sample(given, new=NEW, temperature=0.0, seed=0)
    gaps = _gaps(case, mine)
    found = {"tokens": 0, "other": 0, "ties": 0}
    apart = 0.0
    for row, completion in enumerate(mine):
        others = np.flatnonzero(completion.tokens != tokens[row])
        same = others[0] if len(others) else NEW
        if len(others):
            found["ties" if gaps[row, same] < TIE else "other"] += 1
        found["tokens"] += int(same)
        differ = np.abs(completion.logprobs - logprobs[row])[:same]
        apart = max(apart, float(differ.max(initial=0.0)))
    distinct = statistics.median(len(np.unique(completion.tokens)) for completion in mine)
    return {"prompts": prompts, "distinct": distinct, **found, "apart": apart}


def _ours(
    case: Case, requests: Sequence[RolloutRequest], *, temperature: float
) -> list[Completion]:
    return case.engine.generate(
        requests, adapter=case.adapter, version=0, adapter_sha256="", temperature=temperature
    )


def _best_batch(case: Case, steps: Sequence[Sequence[RolloutRequest]]) -> int:
    """Returns the batch size with which the peer is fastest."""
    rollouts = SLOTS * _TRIED
    some = [step[:rollouts] for step in steps[: max(1, rollouts // len(steps[0]))]]
    sizes = [size for size in _BATCHES if size <= len(steps[0])]
    for size in sizes:
        theirs(case, [steps[0][:size]], batch=size)
    timed = _alternate(*(partial(theirs, case, some, batch=size) for size in sizes), repeats=2)
    fastest = min(range(len(sizes)), key=lambda number: timed[number][1])
    return sizes[fastest]


def _alternate(*runs: Callable[[], SamplingWork], repeats: int) -> list[tuple[SamplingWork, float]]:
    """Runs all in turns; returns the result and the median seconds of each."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        found = []
        for run, kept in zip(runs, seconds, strict=True):
            began = time.perf_counter()
            found.append(run())
            kept.append(time.perf_counter() - began)
    return [(one, statistics.median(kept)) for one, kept in zip(found, seconds, strict=True)]


def _gaps(case: Case, completions: Sequence[Completion]) -> np.ndarray:
    """Returns the difference of the two best logits at each sampled token, `rollouts NEW`.

    Computed by a forward pass over whole sequences, without a cache.
    """
    tokens = np.full((len(completions), PROMPT + NEW), VOCABULARY.pad, np.int32)
    starts = np.array([len(completion.prompt_tokens) - 1 for completion in completions])
    for row, one in zip(tokens, completions, strict=True):
        whole = np.concatenate([one.prompt_tokens, one.tokens])
        row[: len(whole)] = whole
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    forbidden = VOCABULARY.forbidden_mask(case.policy.vocab_size)

    @jax.jit
    def best_two(base: Any, adapter: Any, tokens: jax.Array) -> jax.Array:
        hidden, _ = case.policy.bind(base, adapter)(tokens, positions)
        embedding = case.policy.embedding(base)
        logits = scaled_logits(
            hidden, embedding, softcap=None, temperature=1.0, forbidden=forbidden
        )
        return jax.lax.top_k(logits, 2)[0]

    best = np.asarray(best_two(case.base, case.adapter, tokens))
    at = starts[:, None] + np.arange(NEW)
    return np.take_along_axis(best[..., 0] - best[..., 1], at, axis=1)
