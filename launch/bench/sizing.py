"""`python -m launch.bench sizing`: rollouts and parallel passes against the batch.

Rollouts: time and memory of decoding with all slots busy. Parallel passes: the top 128 log-probs of
the positions of a micro-batch that are learned, by this project's chunked program and with
materialised logits, as plain JAX computes them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from configs.schema import Config
from launch.bench import costs, shapes
from launch.bench.harness import Figures, Found, Row, Section, lines
from launch.bench.shapes import COMPILER, SHAPES, VOCABULARY, config_of
from pipeline.compute.aot.compile import v5e_devices
from pipeline.compute.device_memory import array_bytes, program_bytes
from pipeline.compute.learner.batches import Inputs, place_inputs
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.learner.timing import fastest_s, full_micro_batch, plain_token
from pipeline.compute.model.policy import Params, Policy
from pipeline.data.batching import Packing
from pipeline.plan.lengths import Lengths

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURED = (1, 2, 4, 8, 16, 32, 60, 64, 68, 96, 128, 132, 136, 256, 512)
COMPILED = (1, 8, 64, 68, 128, 132, 256, 512)
OTHERS_COMPILED = (1, 8, 64, 128, 256, 512)
"""Of the other models, and of other samplers of `FULLY_COMPILED`."""
QUICK = (1, 64, 68)
PASSES, QUICK_PASSES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)
FULLY_COMPILED = "gemma3-1b"
LENGTHS, QUICK_LENGTHS = {"prompt": 1024, "new": 1024}, {"prompt": 32, "new": 64}
TOP_K = 128
KNEE = 0.8
"""Share of the best rate at the knee."""
LUMP = 0.95
"""A batch whose rate is below this share of a smaller batch's is a lump."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "without adapter": {},
    "LoRA": {},
    "merged": {"plan__rollout_weights": "merged", "learner__importance_cap": 2.0},
    "LoRA, T 0.7, top_k 50, top_p 0.95": {
        "rollout__temperature": 0.7,
        "rollout__top_k": 50,
        "rollout__top_p": 0.95,
    },
}
ADAPTER = "LoRA"
Point = tuple[int, float, float, float]
"""Batch, elapsed seconds, milliseconds a token, GiB."""


def rollouts(
    *, model: str, device: str, kind: str, batches: Sequence[int], prompt: int, new: int
) -> Figures:
    """Decoding `new` tokens in each of `batches` slots.

    Returns:
        Milliseconds a token by batch, and the points of the plots.
    """
    given = {"device": device, "prompt": prompt, "new": new, **KINDS[kind]}
    configs = [config_of(model, slots=batch, **given) for batch in batches]
    found = costs.samplers(model, configs, device=device, adapter=kind != "without adapter")
    points = list[Point]()
    for batch, one in zip(batches, found, strict=False):
        prefills = math.ceil(math.ceil(batch / shapes.GROUP) / shapes.PREFILLED)
        elapsed_s = prefills * one.prefill_s + new * one.step_s
        points.append((batch, elapsed_s, 1e3 * elapsed_s / (batch * new), one.gib))
    return _figures(points)


def passes(
    *, model: str, device: str, chunked: bool, batches: Sequence[int], prompt: int, new: int
) -> Figures:
    """The top log-probs of micro-batches of `batches` rows; see `rollouts`."""
    points, tokens = list[Point](), prompt + new
    given: dict[str, Any] = {"device": device, "slots": 8, "prompt": prompt, "new": new}
    given |= {"learner__kl": "topk", "learner__kl_top_k": TOP_K, "learner__kl_coef": 0.1}
    with costs.until_full():
        weights = None
        if device != COMPILER:
            weights = shapes.random_model(SHAPES[model], config_of(model, **given))
        for batch in batches:
            config = config_of(model, **given, plan__micro_batch_tokens=batch * tokens)
            if weights is None:
                seconds, gib = _compiled_pass(SHAPES[model], config, chunked=chunked)
            else:
                seconds, gib = _measured_pass(weights, config, chunked=chunked)
            points.append((batch, seconds, 1e3 * seconds / (batch * tokens), gib))
    return _figures(points)


def _measured_pass(model: shapes.Model, config: Config, *, chunked: bool) -> tuple[float, float]:
    """Seconds and GiB."""
    policy, base, adapter = model
    programs = LearnerPrograms(policy, config, VOCABULARY)
    batch = full_micro_batch(config, shape=programs.shape, token=plain_token(VOCABULARY))
    inputs = place_inputs(batch, policy.mesh)
    function = programs.reference_top_k if chunked else _materialised(policy, programs)
    program = policy.jit(function).trace(base, adapter, inputs).lower().compile()
    needed = program_bytes(program)
    if not costs.fits_host(needed):
        raise MemoryError
    seconds = fastest_s(lambda: jax.block_until_ready(program(base, adapter, inputs)))
    return seconds, costs.peak_gib(array_bytes((base, adapter)) + needed)


def _compiled_pass(
    settings: Mapping[str, Any], config: Config, *, chunked: bool
) -> tuple[float, float]:
    """Seconds and GiB."""
    rows = config.micro_batch_rows
    if chunked:
        found = costs.figures(config, f"reference_top_k {rows}")
    else:
        policy = shapes.policy_of(settings, config, v5e_devices(1))
        programs = LearnerPrograms(policy, config, VOCABULARY)
        inputs = programs.abstract_inputs(rows, share_prefix=programs.shape.share_prefix)
        program = policy.jit(_materialised(policy, programs))
        found = costs.traced_figures(program.trace(*policy.abstract_params(), inputs))
    if not found["fits"]:
        raise MemoryError
    return found["ms"] / 1e3, found["gib"]


def _materialised(
    policy: Policy, programs: LearnerPrograms
) -> Callable[[Params, Params, Inputs], Any]:
    """The same pass with all logits in memory, as a plain implementation has it."""
    config = programs.config
    share = Packing.expected(config, Lengths.expected(config)).learned

    def run(base: Params, adapter: Params, inputs: Inputs) -> Any:
        hidden, _ = policy.bind(base, adapter)(
            inputs.tokens, inputs.positions, attend=programs.attention(inputs)
        )
        # As many positions as are learned, which are all that the chunked pass scores.
        hidden = hidden[:, : round(share * hidden.shape[1])]
        logits = jnp.einsum("btd,vd->btv", hidden, policy.embedding(base)).astype(jnp.float32)
        softcap = policy.architecture.shape.final_softcap
        if softcap:
            logits = softcap * jnp.tanh(logits / softcap)
        return jax.lax.top_k(jax.nn.log_softmax(logits), TOP_K)

    return run


def _figures(points: Sequence[Point]) -> dict[str, Any]:
    by_batch = {f"{batch}": per_token for batch, _, per_token, _ in points}
    return {**by_batch, "points": points}


def words(found: Found) -> Iterator[str]:
    """The knee of each curve, and the batches that are slower than smaller ones."""
    for name, row in found.items():
        rates = {batch: 1e3 / per_token for batch, _, per_token, _ in row.get("points", ())}
        if not rates:
            yield f"{name}: nothing fits"
            continue
        best = max(rates.values())
        knee = next(batch for batch, rate in rates.items() if rate >= KNEE * best)
        lumps = [
            f"{batch} ({rates[batch] / rates[before]:.2f} of the rate at {before})"
            for before, batch in pairwise(rates)
            if rates[batch] < LUMP * rates[before]
        ]
        yield (
            f"{name}: {KNEE:.0%} of the best rate, {best:,.0f} tokens a second, from batch {knee}; "
            f"slower than a smaller batch: {', '.join(lumps) or 'none'}"
        )


def draw(found: Found) -> Figure:
    """Elapsed seconds, milliseconds a token and memory against the batch."""
    points = {name: row.get("points", ()) for name, row in found.items()}
    columns = ("batch", "seconds", "milliseconds a token", "GiB of the device")
    return lines(points, columns, [(0, 1), (0, 2), (0, 3)])


def sections(request: argparse.Namespace) -> list[Section]:
    """A section for rollouts and one for passes, with a row for each model and kind.

    Compiled: all kinds and batches of `FULLY_COMPILED`, of the others those with an adapter.
    """
    quick, compiled = request.quick, request.device == COMPILER
    lengths = QUICK_LENGTHS if quick else LENGTHS
    decoded, passed, row = list[Row](), list[Row](), partial(costs.study_row, request)
    for model in costs.chosen_models(request):
        full = model == FULLY_COMPILED
        for kind in KINDS:
            # The compiler has no program of a run without an adapter.
            if compiled and (kind == "without adapter" or not (full or kind == ADAPTER)):
                continue
            batches: Sequence[int] = QUICK if quick else MEASURED
            if compiled:
                batches = COMPILED if full and kind == ADAPTER else OTHERS_COMPILED
            given = {**lengths, "kind": kind, "batches": batches}
            sizes = len(batches)
            programs = sizes + len({shapes.prefilled(batch) for batch in batches})
            decoded.append(row(model, f", {kind}", rollouts, given, sizes=sizes, programs=programs))
        for chunked, name in ((False, ", all logits in memory"), (True, ", chunked")):
            batches = QUICK_PASSES if quick else PASSES
            if compiled:
                batches = (1, 4, 16)[: 1 + chunked + 2 * full]
            given = {**lengths, "chunked": chunked, "batches": batches}
            passed.append(row(model, name, passes, given, sizes=len(batches)))
    decoding = (
        "Milliseconds a generated token by batch, prefill included; prompts of {prompt:,} tokens, "
        "completions of {new:,}"
    )
    passing = (
        f"Milliseconds a position of a pass with the top {TOP_K} log-probs of what is learned, by "
        "batch; what is missing does not fit or is not compiled"
    )
    return [
        Section("rollouts", decoding.format(**lengths), decoded, words=words, draw=draw),
        Section("passes", passing, passed, words=words, draw=draw),
    ]
