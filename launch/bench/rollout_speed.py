"""Our rollout engine beside Tunix's sampler: useful tokens a second, and the same greedy text."""

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
"""Scores this near to one another may come in either order."""
_BATCHES = (1, 2, 4, 8, 16, 32)
"""Of the peer; on a CPU the best is 4 or 8."""
_TRIED = 4
"""Slots' worth of rollouts by which the peer's batch is chosen, and at least measured."""


@dataclass(frozen=True)
class RolloutStep:
    """What it took to draw the rollouts of some steps.

    Attributes:
        tokens: useful ones.
        computed: steps of a row, whether it was still wanted or not.
        prompt_tokens: prompt positions that were read, padding included.
    """

    tokens: int
    computed: int
    prompt_tokens: int


def speed(*, share: int, equal: bool, repeats: int) -> dict[str, Any]:
    """Useful tokens a second of both, in turns; the peer with the batch that suits it best.

    Args:
        share: rollouts of a step for each slot.
        equal: all are as long as may be; else lengths are lognormal.
        repeats: rounds, of which the median counts.
    """
    assert repeats > 0
    case = Case.make()
    count = SLOTS * max(share, _TRIED)
    requests = make_requests([NEW] * count if equal else make_lengths(count).tolist())
    steps = [requests[i : i + share * SLOTS] for i in range(0, count, share * SLOTS)]
    best = _best_batch(case, steps)

    def one() -> RolloutStep:
        return ours(case, steps)

    def other() -> RolloutStep:
        return theirs(case, steps, batch=best)

    ours(case, steps[:1])
    with compilations() as compiled:
        (found, ours_s), (peer, theirs_s) = _in_turns(one, other, repeats=repeats)
    assert found.tokens == peer.tokens, (found, peer)
    return {
        "rollouts": count,
        "steps": len(steps),
        "tokens": found.tokens,
        "ours": found.tokens / ours_s,
        "theirs": found.tokens / theirs_s,
        "ratio": theirs_s / ours_s,
        "batch": best,
        "ours_useful": found.tokens / found.computed,
        "theirs_useful": peer.tokens / peer.computed,
        "ours_prompt": found.prompt_tokens,
        "theirs_prompt": peer.prompt_tokens,
        "compiled": len(compiled),
    }


def ours(case: Case, steps: Sequence[Sequence[RolloutRequest]]) -> RolloutStep:
    """Draws the rollouts of each step with our engine."""
    tokens = computed = prompt_tokens = 0
    for step in steps:
        drawn = _ours(case, step, temperature=1.0)
        lengths = [len(completion.tokens) for completion in drawn]
        assert lengths == [request.max_new_tokens for request in step]
        work = case.engine.work
        tokens += work.tokens
        computed += work.slot_steps
        prompt_tokens += work.prompt_tokens
    return RolloutStep(tokens, computed, prompt_tokens)


def theirs(case: Case, steps: Sequence[Sequence[RolloutRequest]], *, batch: int) -> RolloutStep:
    """Draws them with Tunix's sampler, in static batches as they come."""
    tokens = computed = prompt_tokens = 0
    for step in steps:
        for first in range(0, len(step), batch):
            rows = step[first : first + batch]
            lengths = [request.max_new_tokens or NEW for request in rows]
            drawn, logprobs = case.peer.draw(
                [request.prompt_tokens for request in rows],
                new=max(lengths),
                temperature=1.0,
                seed=first,
            )
            barred = (*VOCABULARY.forbidden, *VOCABULARY.stops)
            assert not np.isin(drawn, barred).any()
            assert (logprobs < 0).all()
            tokens += sum(lengths)
            computed += drawn.size
            prompt_tokens += len(rows) * PROMPT
    return RolloutStep(tokens, computed, prompt_tokens)


def greedy(*, prompts: int) -> dict[str, Any]:
    """Where greedy tokens of both differ, and by how much their log-probs do.

    A row is compared up to its first other token: what follows has another past.
    """
    case = Case.make()
    requests = make_requests([NEW] * GROUP * prompts)[::GROUP]
    mine = _ours(case, requests, temperature=0.0)
    given = [request.prompt_tokens for request in requests]
    tokens, logprobs = case.peer.draw(given, new=NEW, temperature=0.0, seed=0)
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
    """The size of a static batch with which the peer is fastest."""
    rollouts = SLOTS * _TRIED
    some = [step[:rollouts] for step in steps[: max(1, rollouts // len(steps[0]))]]
    sizes = [size for size in _BATCHES if size <= len(steps[0])]
    for size in sizes:
        theirs(case, [steps[0][:size]], batch=size)
    timed = _in_turns(*(partial(theirs, case, some, batch=size) for size in sizes), repeats=2)
    fastest = min(range(len(sizes)), key=lambda number: timed[number][1])
    return sizes[fastest]


def _in_turns(*runs: Callable[[], RolloutStep], repeats: int) -> list[tuple[RolloutStep, float]]:
    """What each found, and its median seconds."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        found = []
        for run, kept in zip(runs, seconds, strict=True):
            began = time.perf_counter()
            found.append(run())
            kept.append(time.perf_counter() - began)
    return [(one, statistics.median(kept)) for one, kept in zip(found, seconds, strict=True)]


def _gaps(case: Case, completions: Sequence[Completion]) -> np.ndarray:
    """By how much the best score is better than the second, `rollouts NEW`, of each drawn token.

    By a forward over whole sequences, without a cache.
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
