"""`python -m launch.bench serve`: the rollout engine under an open-loop load, simulated.

Requests arrive as a Poisson process, whether or not earlier ones have ended. They wait for a slot,
are prefilled in batches, and decode with all others in segments, as `decode.engine` does; tokens
arrive at the end of a segment. Seconds of prefill and segments are measured or compiled, the rest
is simulated.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from launch.bench.costs import chosen_models, samplers, study_row
from launch.bench.harness import Figures, Found, Section, how, lines
from launch.bench.latency import PRECISIONS
from launch.bench.shapes import config_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Requests per second."""
SIZES = {"slots": 256, "prompt": 1024, "new": 1024, "requests": 2_000}
FEWER_SLOTS = {"gemma2-2b": 32}
"""Slots of models with which those of `SIZES` do not fit a v5e."""
QUICK = {"slots": 16, "prompt": 32, "new": 64, "requests": 300}
SPREAD = 0.8
"""Of mixed lengths: standard deviation of the logarithm; the median is a third of the longest."""
KNEE = 0.25
"""An engine keeps up with a load if at its end the requests that wait are at most this share of the
slots."""


@dataclass(frozen=True)
class Engine:
    """Slots, steps between two admissions, seconds of a step and of a prefill, prompts of it."""

    slots: int
    segment: int
    step_s: float
    prefill_s: float
    prefilled: int


def simulate(engine: Engine, arrivals: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
    """Serves requests that arrive at these seconds, each for so many tokens.

    Returns:
        Tokens a second until the last request has a slot; `backlog`, the requests that wait when it
        arrives; medians and 99th percentiles of the seconds to the first token, `ttft_s`, and
        between the following ones, `token_ms`, of a request; the mean number of waiting requests,
        `queue`.
    """
    waiting, left = deque(range(len(arrivals))), dict[int, int]()
    first, last, now, queued = dict[int, float](), dict[int, float](), arrivals[0], 0.0
    began, admitted_last = now, now
    made = backlog = 0
    while waiting or left:
        if not left:
            now = max(now, arrivals[waiting[0]])
        admitted = []
        while waiting and len(left) < engine.slots and arrivals[waiting[0]] <= now:
            admitted.append(waiting.popleft())
            left[admitted[-1]] = tokens[admitted[-1]]
        before = now
        admitted_last = before if admitted else admitted_last
        now += engine.prefill_s * -(-len(admitted) // engine.prefilled)
        now += engine.step_s * engine.segment
        queued += (now - before) * sum(1 for one in waiting if arrivals[one] <= now)
        if waiting or not made:
            made += sum(min(engine.segment, count) for count in left.values())
        if now <= arrivals[-1] or not first:
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
        "tokens_per_s": made / (max(admitted_last, first[0]) - began),
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
        Figures at the knee, the largest rate that the engine keeps up with, or at the smallest if
        there is none, and those of all rates.
    """
    config = config_of(
        model, device=device, slots=slots, prompt=prompt, new=new, **PRECISIONS[precision]
    )
    costs = next(samplers(model, [config], device=device), None)
    if costs is None:
        return {"fits": False}
    rows = config.prefill_rows(max(config.prompt_buckets))
    engine = Engine(slots, config.segment_steps, costs.step_s, costs.prefill_s, rows)
    rng = np.random.default_rng(0)
    tokens = np.full(requests, new)
    if lengths == "mixed":
        drawn = rng.lognormal(np.log(new / 3), SPREAD, requests)
        tokens = np.clip(drawn.round(), 1, new).astype(int)
    gaps = rng.exponential(1.0, requests)
    points = [
        {"rate": rate, **simulate(engine, np.cumsum(gaps / rate).tolist(), tokens.tolist())}
        for rate in RATES
    ]
    kept_up = [point for point in points if point["backlog"] <= KNEE * slots]
    knee = (kept_up or points[:1])[-1]
    most = max(point["tokens_per_s"] for point in points)
    return {
        "how": f"simulated, steps {how()}",
        "knee_requests_per_s": knee["rate"] if kept_up else None,
        **{name: value for name, value in knee.items() if name not in ("rate", "backlog")},
        "most_tokens_per_s": most,
        "usd_per_million": usd / 3600 / most * 1e6,
        "points": points,
    }


def draw(found: Found) -> Figure:
    """Throughput and latencies against the offered load."""
    shown = ("rate", "tokens_per_s", "ttft_p99_s", "token_p99_ms", "queue")
    points = {
        name: [[point[key] for key in shown] for point in row.get("points", ())]
        for name, row in found.items()
    }
    columns = ["requests a second", *(name.replace("_", " ") for name in shown[1:])]
    return lines(points, columns, [(0, y) for y in range(1, len(shown))])


def sections(request: argparse.Namespace) -> list[Section]:
    """A section for each model, with a row for each precision and kind of lengths."""
    given = {"usd": request.usd, **(QUICK if request.quick else SIZES)}
    title = (
        "Requests of {prompt:,} tokens with completions of {new:,} (mixed: lognormal, at most as "
        "many): figures at the largest rate that it keeps up with; dollars at {usd:g} an hour"
    ).format(**given)
    found = []
    for model in chosen_models(request):
        slots = FEWER_SLOTS.get(model, given["slots"])
        rows = [
            study_row(
                request,
                model,
                f", {slots} slots, {precision}, {lengths} lengths",
                served,
                {**given, "slots": slots, "precision": precision, "lengths": lengths},
                sizes=1,
                # Both kinds of lengths have the same programs, which the first compiles.
                programs=2 if lengths == "fixed" else 0,
            )
            for precision in PRECISIONS
            for lengths in ("fixed", "mixed")
        ]
        found.append(Section(f"serve-{model}", title, rows, draw=draw))
    return found
