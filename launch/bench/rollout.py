"""`python -m launch.bench rollout`: our rollout engine beside Tunix's sampler.

Speed and greedy text: same process, weights, prompts and lengths.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from flax import nnx

from launch.bench.harness import Bound, Figures, Row, Section, compilations, medians
from launch.bench.shapes import GROUP, SMALL, VOCABULARY, one_device, random_model
from launch.bench.tunix import Peer, TunixSampler
from pipeline.compute.decode.engine import Engine
from pipeline.compute.model.policy import Params
from pipeline.types import Completion, RolloutName, RolloutRequest

SLOTS, SEGMENT = 16, 8
PROMPT, NEW = 64, 256
"""Largest lengths of a prompt, which has at least half of it, and of a completion."""
SPREAD, MEDIAN = 0.8, 0.272
"""Lognormal length of a completion: standard deviation of the logarithm, and median as a share of
`NEW`. Truncated at `NEW`, the mean is 0.35 of it."""
TIE = 1e-5
"""Tokens whose log-probs are closer than this may be ordered either way."""
_BATCHES = (1, 4, 8, 16)
"""Tried batch sizes of the peer; on a CPU the best is 4 or 8."""
_TRIED = 4
"""Rollouts per slot for choosing the peer's batch size, and the minimum for measuring."""

Steps = Sequence[Sequence[RolloutRequest]]


def make_requests(lengths: Sequence[int]) -> list[RolloutRequest]:
    """Requests of these lengths; `GROUP` consecutive ones have the same prompt."""
    rng, requests = np.random.default_rng(1), list[RolloutRequest]()
    for number, length in enumerate(lengths):
        prompt, sample = divmod(number, GROUP)
        if sample == 0:
            size = rng.integers(PROMPT // 2, PROMPT + 1)
            tokens = rng.integers(2, SMALL["vocab_size"], size).astype(np.int32)
        name = RolloutName("train", 0, prompt, sample)
        requests.append(RolloutRequest(name, tokens, int(length)))
    return requests


def make_lengths(count: int) -> np.ndarray:
    """`count` lognormal lengths, truncated at `NEW`; the same at each call."""
    lengths = np.random.default_rng(2).lognormal(math.log(MEDIAN * NEW), SPREAD, count)
    return np.clip(lengths.round(), 1, NEW).astype(int)


@dataclass(frozen=True)
class Case:
    """Both samplers, with the same weights."""

    adapter: Params
    engine: Engine
    peer: TunixSampler

    @staticmethod
    def make() -> Case:
        """Makes random weights, the same at each call."""
        own = {"plan__slot_buckets": "none", "plan__segment_steps": SEGMENT}
        config = one_device("demo", slots=SLOTS, prompt=PROMPT, new=NEW, **own)
        # A larger embedding makes every token repeat; with this norm logits have a standard
        # deviation of about 1.
        policy, base, adapter = random_model(SMALL, config, embedding=0.03)
        base["final_norm.scale"] += 2.0
        peer = Peer.create(policy.architecture.config, config.lora)
        model = nnx.merge(peer.graphdef, *peer.with_values({**base, **adapter}))
        sampler = TunixSampler(model, VOCABULARY, prompt=PROMPT, new=NEW)
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
        """The batch size with which the peer is fastest; all that it may be are compiled."""
        rollouts = SLOTS * _TRIED
        some = [step[:rollouts] for step in steps[: max(1, rollouts // len(steps[0]))]]
        sizes = [size for size in _BATCHES if size <= len(steps[0])]
        for size in sizes:
            self.theirs([steps[0][:size]], batch=size)
        runs = {size: partial(self.theirs, some, batch=size) for size in sizes}
        seconds = medians(runs, repeats=2)
        return min(seconds, key=lambda size: seconds[size])


def speed(*, share: int, equal: bool, repeats: int) -> Figures:
    """Useful tokens a second of both, in turns, with `share` rollouts of a step per slot.

    Also the shares of the computed decode steps that gave a useful token.
    """
    case, count = Case.make(), SLOTS * max(share, _TRIED)
    requests = make_requests([NEW] * count if equal else make_lengths(count).tolist())
    steps = [requests[i : i + share * SLOTS] for i in range(0, count, share * SLOTS)]
    tokens = sum(request.max_new_tokens or NEW for request in requests)
    batch = case.best_batch(steps)
    case.ours(steps[:1])
    computed: dict[str, int] = {}
    runs = {
        "ours": lambda: computed.update(ours=case.ours(steps)),
        "theirs": lambda: computed.update(theirs=case.theirs(steps, batch=batch)),
    }
    with compilations() as compiled:
        seconds = medians(runs, repeats=repeats)
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


def sections(request: argparse.Namespace) -> list[Section]:
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
    return [lengths, text]
