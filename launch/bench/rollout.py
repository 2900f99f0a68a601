"""`python -m launch.bench rollout`: our rollout engine beside Tunix's sampler.

Speed and greedy text on this machine's CPU: same process, weights, prompts and lengths. Memory on a
v5e chip by the TPU compiler.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma3 import model as gemma3

from configs.schema import Config
from launch.bench.counting import compilations
from launch.bench.harness import Benchmark, Bound, Row, Section, medians
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
from launch.bench.tunix import Peer, TunixSampler, on
from launch.bench.v5e import PROMPT as V5E_PROMPT
from launch.bench.v5e import figures, traced_figures, v5e_config
from pipeline.compute.aot.compile import VOCABULARY as GEMMA_VOCABULARY
from pipeline.compute.aot.compile import trace, v5e_devices
from pipeline.compute.decode.engine import Engine
from pipeline.compute.model.policy import Params
from pipeline.compute.model.sharding import make_mesh
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.memory import memory_beside
from pipeline.plan.cost_model.program_memory import ProcessArrays
from pipeline.plan.topology import HBM_GIB, TPU_COMPILER
from pipeline.types import Completion, RolloutRequest

LENGTH = 1312
"""Positions of a prompt and its completion on a v5e chip."""
TIE = 1e-5
"""Tokens whose log-probs are closer than this may be ordered either way."""
_BATCHES = (1, 2, 4, 8, 16, 32)
"""Tried batch sizes of the peer; on a CPU the best is 4 or 8."""
_TRIED = 4
"""Rollouts per slot for choosing the peer's batch size, and the minimum for measuring."""


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


def speed(*, share: int, equal: bool, repeats: int) -> dict[str, Any]:
    """Returns useful tokens a second of both, alternating; the peer with its best batch size.

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
    batch = best_batch(case, steps)
    ours(case, steps[:1])
    computed: dict[str, int] = {}

    def run_ours() -> None:
        computed["ours"] = ours(case, steps)

    def run_theirs() -> None:
        computed["theirs"] = theirs(case, steps, batch=batch)

    with compilations() as compiled:
        seconds = medians({"ours": run_ours, "theirs": run_theirs}, repeats=repeats)
    return {
        "tokens": tokens,
        "ours": tokens / seconds["ours"],
        "theirs": tokens / seconds["theirs"],
        "ratio": seconds["theirs"] / seconds["ours"],
        "batch": batch,
        "ours_useful": tokens / computed["ours"],
        "theirs_useful": tokens / computed["theirs"],
        "compiled": len(compiled),
    }


def ours(case: Case, steps: Sequence[Sequence[RolloutRequest]]) -> int:
    """Samples the rollouts of each step with our engine; returns the decode steps of all slots."""
    computed = 0
    for step in steps:
        completions = case.generate(step, temperature=1.0)
        lengths = [len(completion.tokens) for completion in completions]
        assert lengths == [request.max_new_tokens for request in step]
        computed += case.engine.work.slot_steps
    return computed


def theirs(case: Case, steps: Sequence[Sequence[RolloutRequest]], *, batch: int) -> int:
    """Samples them with Tunix's sampler, in static batches in their order; returns as `ours`."""
    computed = 0
    for step in steps:
        for first in range(0, len(step), batch):
            rows = step[first : first + batch]
            longest = max(request.max_new_tokens or NEW for request in rows)
            prompts = [request.prompt_tokens for request in rows]
            sampled, logprobs = case.peer.sample(prompts, new=longest, temperature=1.0, seed=first)
            excluded = (*VOCABULARY.forbidden, *VOCABULARY.stops)
            assert not np.isin(sampled, excluded).any()
            assert (logprobs < 0).all()
            computed += sampled.size
    return computed


def best_batch(case: Case, steps: Sequence[Sequence[RolloutRequest]]) -> int:
    """Returns the batch size with which the peer is fastest."""
    rollouts = SLOTS * _TRIED
    some = [step[:rollouts] for step in steps[: max(1, rollouts // len(steps[0]))]]
    sizes = [size for size in _BATCHES if size <= len(steps[0])]
    for size in sizes:
        theirs(case, [steps[0][:size]], batch=size)
    runs = {str(size): partial(theirs, case, some, batch=size) for size in sizes}
    seconds = medians(runs, repeats=2)
    return min(sizes, key=lambda size: seconds[str(size)])


def greedy(*, prompts: int) -> dict[str, Any]:
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


def memory(
    *, slots: int, model: str = "gemma3_1b", devices: int = 1, **settings: Any
) -> dict[str, Any]:
    """Returns figures of a sampler with `slots` slots on each chip: prefill, fill and decoding.

    Compaction is left out: it needs a small copy of one layer's slots, less than the segment's
    temporaries.

    Args:
        slots: on each chip.
        model: of which the v5e-8 preset is used.
        devices: chips.
        settings: further settings, `table__key=value`.

    Returns:
        GiB of a chip while each program runs, with all that is on the chip for rollouts, and the
        largest; and the figures of `decoding`.
    """
    config = v5e_config(
        model, length=LENGTH, devices=devices, plan__slots=slots * devices, **settings
    )
    shape, bucket = shape_of(config), max(config.prompt_buckets)
    segment, prefill, fill = f"segment {config.slots}", f"prefill {bucket}", f"fill {bucket}"
    # The learner's adapter and Adam's two moments are no part of a sampler.
    learner = 3 * ProcessArrays.of(config, shape, segment).adapter

    def beside(program: str) -> int:
        return sum(memory_beside(config, shape, program).values()) - learner

    decoded = figures(config, segment, beside=beside(segment))
    read = figures(config, prefill, beside=beside(prefill))
    traced, _ = trace(config, shape, fill)
    filled = traced_figures(traced, beside=beside(fill), timed=False)
    found = {"segment_gib": decoded, "prefill_gib": read, "fill_gib": filled}
    sizes = {name: one["gib"] for name, one in found.items()}
    return {
        "fits": all(one["fits"] for one in found.values()),
        "gib": None if None in sizes.values() else max(sizes.values()),
        **sizes,
        **decoding(config, decoded["ms"]),
    }


def decoding(config: Config, segment_ms: float | None) -> dict[str, Any]:
    """Returns figures of a segment that decodes all slots; speed only if the time is known.

    Returns:
        KV bytes of a sequence, also as a share of caches with all positions of all layers;
        milliseconds of a decode step and tokens a second on each chip.
    """
    shape, length = shape_of(config), config.rollout.max_tokens
    arrays = ProcessArrays.of(config, shape, f"segment {config.slots}")
    rings = sum(arrays.caches(1, length).values())
    widths = sum(map(shape.head_dim_of, range(shape.layers)))
    dense = length * 2 * arrays.kv_heads * widths * arrays.number
    found = {"kv_mb": rings / 1e6, "kv_share": rings / dense}
    if segment_ms is not None:
        found["step_ms"] = segment_ms / config.segment_steps
        found["tokens_per_s"] = 1e3 * config.slots / arrays.devices.count / found["step_ms"]
    return found


def their_memory(*, rows: int) -> dict[str, Any]:
    """Returns GiB of Tunix's decode program for a static batch of gemma3-1b."""
    place = NamedSharding(make_mesh(v5e_devices(1)), PartitionSpec())
    config = v5e_config("gemma3_1b", length=LENGTH)
    peer = Peer.create(gemma3.ModelConfig.gemma3_1b_it(), config.lora)
    weights = on(place, peer.lora), on(place, peer.base)
    sampler = peer.sampler(weights, GEMMA_VOCABULARY, prompt=V5E_PROMPT, new=LENGTH - V5E_PROMPT)
    found = traced_figures(sampler.trace_decode(rows, place), timed=False)
    return {"fits": found["fits"], "gib": found["gib"]}


_4B = {"slots": 32, "model": "gemma3_4b", "devices": 8}

BENCHMARK = Benchmark(
    (
        Section(
            "lengths",
            "Useful tokens a second, warm, N rollouts a step in S = 16 slots, 8 steps a segment; "
            "Tunix in static batches of its best size, compiled before. A Gemma 3 of seven layers, "
            "width 128, window 64 and 512 entries, float32, LoRA of rank 16; 8 rollouts for each "
            "prompt of 32 to 64 tokens, of at most 256, ended by force: lognormal (0.8), mean 0.35 "
            "of that; where all are equal, N = S",
            (
                *(
                    Row(f"N/S = {n}", speed, {"share": n, "equal": False, "repeats": 3})
                    for n in (16, 4, 1)
                ),
                Row("all lengths equal", speed, {"share": 1, "equal": True, "repeats": 3}),
            ),
            (
                Bound("ratio", least=4.5, rows="N/S = 16"),
                Bound("ratio", least=1.8, rows="all *"),
                Bound("ours_useful", least=0.9, rows="N/S = 16"),
                Bound("ours_useful", least=0.75, rows="N/S = 4"),
                Bound("ours_useful", least=0.6, rows="N/S = 1"),
                Bound("compiled", most=0),
            ),
        ),
        Section(
            "greedy",
            "Greedy text of both under the same weights, row by row up to the first other token; "
            "a tie: both have the same log-prob within 1e-5",
            (Row("256 tokens each", greedy, {"prompts": 32}),),
            (Bound("other", most=0), Bound("ties", most=2), Bound("apart", most=1e-4)),
        ),
        Section(
            "memory",
            "GiB of a v5e chip's 15.75 by the TPU compiler, gemma3-1b, 1,312 positions, LoRA of "
            "rank 32, noise and log-probs included; ours: the fullest moment of prefill, fill and "
            "decoding, with all that is on the chip beside; milliseconds are the compiler's "
            "estimate",
            (
                Row("ours, 512 slots", memory, {"slots": 512}),
                Row("ours, 768 slots", memory, {"slots": 768}),
                Row(
                    "ours, 768 slots, caches in 8 bits",
                    memory,
                    {"slots": 768, "plan__kv_cache": "int8"},
                ),
                Row("ours, gemma3-4b on 8 chips, 32 slots each", memory, _4B),
                Row("Tunix's decode program, 384 rows", their_memory, {"rows": 384}),
                Row("Tunix's decode program, 416 rows", their_memory, {"rows": 416}),
            ),
            (
                Bound("gib", most=HBM_GIB - 4, rows="ours, 512 slots"),
                # Not claimed for 4b: most of its layers see 1,024 of these positions.
                Bound("kv_share", most=0.5, rows="ours, 512 slots"),
            ),
            TPU_COMPILER,
        ),
    )
)
