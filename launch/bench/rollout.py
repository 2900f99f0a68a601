"""`python -m launch.bench rollout`: our rollout engine beside Tunix's sampler.

Speed and greedy text: same process, weights, prompts and lengths.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from launch.bench.harness import Benchmark, Bound, Figures, Row, Section, compilations, medians
from launch.bench.small_gemma import (
    GROUP,
    NEW,
    PROMPT,
    SLOTS,
    VOCABULARY,
    make_lengths,
    make_requests,
    small_config,
    small_policy,
)
from launch.bench.tunix import Peer, TunixSampler
from pipeline.compute.decode.engine import Engine
from pipeline.compute.model.policy import Params
from pipeline.types import Completion, RolloutRequest

TIE = 1e-5
"""Tokens whose log-probs are closer than this may be ordered either way."""
_BATCHES = (1, 4, 8, 16)
"""Tried batch sizes of the peer; on a CPU the best is 4 or 8."""
_TRIED = 4
"""Rollouts per slot for choosing the peer's batch size, and the minimum for measuring."""

Steps = Sequence[Sequence[RolloutRequest]]


@dataclass(frozen=True)
class Case:
    """Both samplers, with the same weights.

    Attributes:
        adapter: a non-zero LoRA.
        engine: our rollout engine.
        peer: Tunix's sampler.
    """

    adapter: Params
    engine: Engine
    peer: TunixSampler

    @staticmethod
    def make() -> Case:
        """Makes random weights, the same at each call."""
        config = small_config()
        policy, base, adapter = small_policy(config)
        peer = Peer.create(policy.architecture.config, config.lora)
        weights = peer.with_values({**base, **adapter})
        sampler = peer.sampler(weights, VOCABULARY, prompt=PROMPT, new=NEW)
        return Case(adapter, Engine(policy, base, config, VOCABULARY), sampler)

    def generate(
        self, requests: Sequence[RolloutRequest], *, temperature: float
    ) -> list[Completion]:
        """Samples rollouts with our engine."""
        return self.engine.generate(
            requests, adapter=self.adapter, version=0, adapter_sha256="", temperature=temperature
        )

    def ours(self, steps: Steps) -> int:
        """Samples the rollouts of each step with our engine; returns the decode steps of slots."""
        computed = 0
        for step in steps:
            completions = self.generate(step, temperature=1.0)
            lengths = [len(completion.tokens) for completion in completions]
            assert lengths == [request.max_new_tokens for request in step]
            computed += self.engine.work.slot_steps
        return computed

    def theirs(self, steps: Steps, *, batch: int) -> int:
        """Samples them with Tunix's sampler, in static batches in their order; see `ours`."""
        computed = 0
        for step in steps:
            for first in range(0, len(step), batch):
                rows = step[first : first + batch]
                longest = max(request.max_new_tokens or NEW for request in rows)
                prompts = [request.prompt_tokens for request in rows]
                sampled, _ = self.peer.sample(prompts, new=longest, temperature=1.0, seed=first)
                computed += sampled.size
        return computed

    def best_batch(self, steps: Steps) -> int:
        """Returns the batch size with which the peer is fastest."""
        rollouts = SLOTS * _TRIED
        some = [step[:rollouts] for step in steps[: max(1, rollouts // len(steps[0]))]]
        sizes = [size for size in _BATCHES if size <= len(steps[0])]
        for size in sizes:
            self.theirs([steps[0][:size]], batch=size)
        runs = {str(size): partial(self.theirs, some, batch=size) for size in sizes}
        seconds = medians(runs, repeats=2)
        return min(sizes, key=lambda size: seconds[str(size)])


def speed(*, share: int, equal: bool, repeats: int) -> Figures:
    """Useful tokens a second of both, alternating; the peer with its best batch size.

    Args:
        share: rollouts of a step per slot.
        equal: all rollouts have the largest length; otherwise lengths are lognormal.
        repeats: rounds; the median counts.

    Returns:
        Also the shares of the computed decode steps that gave a useful token.
    """
    case, count = Case.make(), SLOTS * max(share, _TRIED)
    requests = make_requests([NEW] * count if equal else make_lengths(count).tolist())
    steps = [requests[i : i + share * SLOTS] for i in range(0, count, share * SLOTS)]
    tokens = sum(request.max_new_tokens or NEW for request in requests)
    batch = case.best_batch(steps)
    case.ours(steps[:1])
    computed: dict[str, int] = {}

    def run_ours() -> None:
        computed["ours"] = case.ours(steps)

    def run_theirs() -> None:
        computed["theirs"] = case.theirs(steps, batch=batch)

    with compilations() as compiled:
        seconds = medians({"ours": run_ours, "theirs": run_theirs}, repeats=repeats)
    return {
        "tokens": tokens,
        "ours_per_s": tokens / seconds["ours"],
        "theirs_per_s": tokens / seconds["theirs"],
        "ratio": seconds["theirs"] / seconds["ours"],
        "their_batch": batch,
        "ours_useful": tokens / computed["ours"],
        "theirs_useful": tokens / computed["theirs"],
        "compiled": len(compiled),
    }


def greedy(*, prompts: int) -> Figures:
    """Counts different greedy tokens of both, and the difference of their log-probs.

    A row is compared up to its first different token: later tokens have different contexts. Two
    different tokens with equal log-probs are a tie.
    """
    case = Case.make()
    requests = make_requests([NEW] * GROUP * prompts)[::GROUP]
    mine = case.generate(requests, temperature=0.0)
    given = [request.prompt_tokens for request in requests]
    tokens, logprobs = case.peer.sample(given, new=NEW, temperature=0.0, seed=0)
    found, apart = {"tokens": 0, "other": 0, "ties": 0}, 0.0
    for row, completion in enumerate(mine):
        others = np.flatnonzero(completion.tokens != tokens[row])
        same = others[0] if len(others) else NEW
        differ = np.abs(completion.logprobs - logprobs[row])
        if len(others):
            found["ties" if differ[same] < TIE else "other"] += 1
        found["tokens"] += int(same)
        apart = max(apart, float(differ[:same].max(initial=0.0)))
    distinct = statistics.median(len(np.unique(completion.tokens)) for completion in mine)
    return {"prompts": prompts, "distinct": distinct, **found, "apart": apart}


def benchmark(request: argparse.Namespace) -> Benchmark:
    """Rows for short and long steps, and for greedy text."""
    quick = request.quick
    shapes = [("N/S = 16", 16, False), ("N/S = 4", 4, False), ("all lengths equal", 1, True)]
    lengths = Section(
        "lengths",
        "Useful tokens a second, warm, N rollouts a step in S = 16 slots, 8 steps a segment; "
        "Tunix in static batches of its best size, compiled before. A Gemma 3 of seven layers, "
        "width 128, window 64 and 512 entries, float32, LoRA of rank 16; 8 rollouts for each "
        "prompt of 32 to 64 tokens, of at most 256, ended by force: lognormal (0.8), mean 0.35 "
        "of that; where all are equal, N = S",
        [
            Row(name, speed, {"share": share, "equal": equal, "repeats": 1 if quick else 3}, cost)
            for (name, share, equal), cost in zip(shapes, (180, 60, 90), strict=True)
            if not quick or share == 4
        ],
        [
            Bound("ratio", least=3, rows="N/S*"),
            Bound("ratio", least=1.5, rows="all*"),
            Bound("ours_useful", least=0.9, rows="N/S = 16"),
            Bound("ours_useful", least=0.75, rows="N/S = 4"),
            Bound("compiled", most=0),
        ],
    )
    text = Section(
        "greedy",
        "Greedy text of both under the same weights, row by row up to the first other token; "
        "a tie: both have the same log-prob within 1e-5",
        [Row("256 tokens each", greedy, {"prompts": 4 if quick else 32}, seconds=20)],
        [Bound("other", most=0), Bound("ties", most=2), Bound("apart", most=1e-4)],
    )
    return Benchmark([lengths, text])
