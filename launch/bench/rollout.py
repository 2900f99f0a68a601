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
_TRIED = 64
"""Rollouts for choosing it."""


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

    def ours(self, step: Sequence[RolloutRequest]) -> int:
        """Samples the rollouts of a step with our engine; returns the decode steps of slots."""
        lengths = [len(completion.tokens) for completion in self.generate(step, temperature=1.0)]
        assert lengths == [request.max_new_tokens for request in step]
        return self.engine.work.slot_steps

    def theirs(self, step: Sequence[RolloutRequest], *, batch: int) -> int:
        """Samples them with Tunix's sampler, in static batches in their order; see `ours`."""
        computed = 0
        for first in range(0, len(step), batch):
            rows = step[first : first + batch]
            longest = max(request.max_new_tokens or NEW for request in rows)
            prompts = [request.prompt_tokens for request in rows]
            sampled, _ = self.peer.sample(prompts, new=longest, temperature=1.0, seed=first)
            computed += sampled.size
        return computed

    def best_batch(self, step: Sequence[RolloutRequest]) -> int:
        """The batch size with which the peer is fastest; all that it may be are compiled."""
        sizes = [size for size in _BATCHES if size <= len(step)]
        for size in sizes:
            self.theirs(step[:size], batch=size)
        runs = {size: partial(self.theirs, step[:_TRIED], batch=size) for size in sizes}
        seconds = medians(runs, repeats=2)
        return min(seconds, key=lambda size: seconds[size])


def speed(*, share: int, equal: bool, repeats: int) -> Figures:
    """Useful tokens a second of both, in turns, for a step with `share` rollouts per slot.

    Also the shares of the computed decode steps that gave a useful token.
    """
    case, count = Case.make(), SLOTS * share
    step = make_requests([NEW] * count if equal else make_lengths(count).tolist())
    tokens = sum(request.max_new_tokens or NEW for request in step)
    batch = case.best_batch(step)
    computed = {"ours": case.ours(step), "theirs": case.theirs(step, batch=batch)}
    runs = {"ours": partial(case.ours, step), "theirs": partial(case.theirs, step, batch=batch)}
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
    shapes = [
        ("N/S = 4", 4, False, 60),
        ("N/S = 16", 16, False, 180),
        ("all lengths equal", 1, True, 90),
    ]
    prompts, repeats = 32, 3
    if request.quick:
        prompts, repeats, shapes = 4, 1, shapes[:1]
    rows = [
        Row(name, speed, {"share": share, "equal": equal, "repeats": repeats}, seconds)
        for name, share, equal, seconds in shapes
    ]
    return [
        Section(
            "lengths",
            "Useful tokens a second, warm, N rollouts a step in S = 16 slots; Tunix in static "
            "batches of its best size, compiled before. Lengths are lognormal (0.8), mean 0.35 of "
            "the longest, 256, ended by force; where all are equal, N = S",
            rows,
            [
                Bound("ratio", least=3, rows="N/S*"),
                Bound("ratio", least=1.5, rows="all*"),
                Bound("ours_useful", least=0.9, rows="N/S = 16"),
                Bound("ours_useful", least=0.75, rows="N/S = 4"),
                Bound("compiled", most=0),
            ],
        ),
        Section(
            "greedy",
            "Greedy text of both under the same weights, row by row up to the first other token; "
            "a tie: both have the same log-prob within 1e-5",
            [Row("256 tokens each", greedy, {"prompts": prompts}, seconds=20)],
            [Bound("other", most=0), Bound("ties", most=2), Bound("apart", most=1e-4)],
        ),
    ]
