"""`python -m launch.bench serve`: the rollout engine under an open-loop load, simulated.

Requests arrive as a Poisson process, whether or not earlier ones have ended. They wait for a slot,
are prefilled in batches, and decode with all others in segments, as `decode.engine` does; tokens
arrive at the end of a segment. Seconds of prefill and segments are measured or compiled, the rest
is simulated.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from launch.bench.harness import Benchmark, Figures, Section, how, lines
from launch.bench.latency import PRECISIONS
from launch.bench.shapes import chosen_models, config_of, expected_on, sampler, study_row

RATES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Requests per second."""
REQUESTS, QUICK_REQUESTS = 2_000, 300
SLOTS, QUICK_SLOTS = 256, 16
PROMPT, NEW = 1024, 1024
QUICK_PROMPT, QUICK_NEW = 32, 64
SPREAD = 0.8
"""Of mixed lengths: standard deviation of the logarithm; the median is a third of the longest."""
KNEE = 0.25
"""An engine keeps up with a load if at its end the requests that wait are at most this share of the
slots."""


@dataclass(frozen=True)
class Engine:
    """Costs of the engine.

    Attributes:
        slots: that decode at once.
        segment: decode steps between two admissions.
        step_s: seconds of a step.
        prefill_s: of a prefill.
        prefilled: prompts of a prefill.
    """

    slots: int
    segment: int
    step_s: float
    prefill_s: float
    prefilled: int


def simulate(engine: Engine, arrivals: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
    """Serves requests.

    Args:
        engine: its costs.
        arrivals: seconds, ascending.
        tokens: of each completion.

    Returns:
        Tokens a second until the last arrival; `backlog`, the requests that wait then; medians and
        99th percentiles of the seconds to the first token, `ttft_s`, and between the following
        ones, `token_ms`, of a request; the mean number of waiting requests, `queue`.
    """
    waiting, left = deque(range(len(arrivals))), dict[int, int]()
    first, last, now, queued = dict[int, float](), dict[int, float](), arrivals[0], 0.0
    began, ends = now, arrivals[-1]
    made = backlog = 0
    while waiting or left:
        if not left:
            now = max(now, arrivals[waiting[0]])
        admitted = []
        while waiting and len(left) < engine.slots and arrivals[waiting[0]] <= now:
            admitted.append(waiting.popleft())
            left[admitted[-1]] = tokens[admitted[-1]]
        before = now
        now += engine.prefill_s * -(-len(admitted) // engine.prefilled)
        now += engine.step_s * engine.segment
        queued += (now - before) * sum(1 for one in waiting if arrivals[one] <= now)
        if now <= ends or not made:
            made += sum(min(engine.segment, count) for count in left.values())
            backlog = sum(1 for one in waiting if arrivals[one] <= now)
        for one in list(left):
            first.setdefault(one, now)
            left[one] -= engine.segment
            if left[one] <= 0:
                del left[one]
                last[one] = now
    ttft = np.array([first[one] - arrivals[one] for one in range(len(arrivals))])
    between = np.array(
        [(last[one] - first[one]) / max(1, tokens[one] - 1) for one in range(len(arrivals))]
    )
    return {
        "tokens_per_s": made / max(ends - began, first[0] - began),
        "backlog": backlog,
        "ttft_s": float(np.median(ttft)),
        "ttft_p99_s": float(np.quantile(ttft, 0.99)),
        "token_ms": 1e3 * float(np.median(between)),
        "token_p99_ms": 1e3 * float(np.quantile(between, 0.99)),
        "queue": queued / (now - began),
    }


def served(
    *,
    model: str,
    device: str,
    precision: str,
    lengths: Literal["fixed", "mixed"],
    slots: int,
    prompt: int,
    new: int,
    requests: int,
    usd: float,
) -> Figures:
    """One engine under each of `RATES`.

    Returns:
        Figures at the knee, the largest rate that the engine keeps up with, and those of all rates.
    """
    config = config_of(
        model, device=device, slots=slots, prompt=prompt, new=new, **PRECISIONS[precision]
    )
    try:
        costs = sampler(model, config, device=device)
    except MemoryError:
        return {"fits": False}
    (bucket,) = config.prompt_buckets
    engine = Engine(
        slots, config.segment_steps, costs.step_s, costs.prefill_s, config.prefill_rows(bucket)
    )
    rng = np.random.default_rng(0)
    tokens = np.full(requests, new)
    if lengths == "mixed":
        drawn = rng.lognormal(np.log(new / 3), SPREAD, requests)
        tokens = np.clip(drawn.round(), 1, new).astype(int)
    gaps = rng.exponential(1.0, requests)
    points = []
    for rate in RATES:
        arrivals = np.cumsum(gaps / rate)
        found = simulate(engine, arrivals.tolist(), tokens.tolist())
        points.append({"rate": rate, **found})
    knee = max(
        (point for point in points if point["backlog"] <= KNEE * slots),
        key=lambda point: point["rate"],
        default=points[0],
    )
    most = max(point["tokens_per_s"] for point in points)
    return {
        "how": f"simulated, steps {how()}",
        "knee_requests_per_s": knee["rate"],
        **{name: knee[name] for name in ("tokens_per_s", "ttft_s", "ttft_p99_s")},
        **{name: knee[name] for name in ("token_ms", "token_p99_ms", "queue")},
        "most_tokens_per_s": most,
        "usd_per_million": usd / 3600 / most * 1e6,
        "points": points,
    }


def words(found: Mapping[str, Figures]) -> Iterator[str]:
    """Where each engine saturates."""
    for name, row in found.items():
        if "points" in row:
            yield (
                f"{name}: keeps up with {row['knee_requests_per_s']} of {RATES} requests a second; "
                f"at most {row['most_tokens_per_s']:,.0f} tokens a second"
            )


def draw(found: Mapping[str, Figures]) -> Figure:
    """Throughput and latencies against the offered load."""
    shown = ("tokens_per_s", "ttft_p99_s", "token_p99_ms", "queue")
    points = {
        name: [[point[key] for key in ("rate", *shown)] for point in row.get("points", ())]
        for name, row in found.items()
    }
    return lines(points, x="requests a second", y=[name.replace("_", " ") for name in shown])


def benchmark(request: argparse.Namespace) -> Benchmark:
    """A row for each model, precision and kind of lengths."""
    quick = request.quick
    given: dict[str, Any] = {
        "usd": request.usd,
        "slots": QUICK_SLOTS if quick else SLOTS,
        "prompt": QUICK_PROMPT if quick else PROMPT,
        "new": QUICK_NEW if quick else NEW,
        "requests": QUICK_REQUESTS if quick else REQUESTS,
    }
    title = (
        f"Requests of {given['prompt']:,} tokens with completions of {given['new']:,} (mixed: "
        f"lognormal, at most as many), {given['slots']} slots: figures at the largest rate that it "
        f"keeps up with; dollars at {request.usd:g} an hour"
    )
    rows = [
        study_row(
            request,
            model,
            f", {precision}, {lengths} lengths",
            served,
            {**given, "precision": precision, "lengths": lengths},
            sizes=1,
            # Both kinds of lengths have the same programs, which the first compiles.
            programs=2 if lengths == "fixed" else 0,
        )
        for model in chosen_models(request)
        for precision in PRECISIONS
        for lengths in ("fixed", "mixed")
    ]
    section = Section("serve", title, rows, words=words, draw=draw)
    return Benchmark([section], expected_on=expected_on(request))
