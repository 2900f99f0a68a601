"""`python -m launch.bench torch`: decoding and gradients beside a plain loop of transformers.

Both sides read the same random weights in bfloat16, each in a process of its own, and use the GPU
if there is one. Rollouts come in groups of eight with one prompt; the peer computes it for each of
them, as a plain loop does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from configs.machine import nvidia_gpus, this_machine
from configs.schema import Config
from launch.bench.harness import Benchmark, Bound, Figures, Row, Section, in_child, medians
from launch.bench.learner import Case, random_rollouts
from launch.bench.small_gemma import GROUP, SMALL, VOCABULARY, one_device
from pipeline.compute.decode.engine import Engine
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import open_policy
from pipeline.data.models.find_shape import PUBLISHED
from pipeline.data.models.hf_config import read_model_shape
from pipeline.plan.cost_model.hardware import TOPOLOGIES
from pipeline.plan.topology import GIB
from pipeline.types import Completion, RolloutRequest

SIZES = {
    "decode": {"rows": 64, "prompt": 256, "new": 256},
    "gradient": {"rows": 32, "prompt": 256, "new": 768},
}
"""Rollouts, and tokens of their prompts and completions."""
QUICK = {"rows": 8, "prompt": 24, "new": 16}
MICRO = 4
"""Rows of a micro-batch of the peer's gradient; ours has as many positions."""
APART = 0.05
"""Largest difference of the mean log-prob of sampled tokens, both in bfloat16."""
_USEFUL = 4
"""Operations per learned token and parameter that count for MFU, as in a run's metrics."""


def make_config(sizes: Mapping[str, int]) -> Config:
    """A preset for a GPU without a KL term, each layer recomputed."""
    rows, prompt, new = sizes["rows"], sizes["prompt"], sizes["new"]
    return one_device(
        "gemma3_1b_gsm8k_gpu80",
        slots=rows,
        prompt=prompt,
        new=new,
        plan__platform=this_machine().platform,
        plan__hbm_gib="none",
        plan__prefill_tokens=rows // GROUP * prompt,
        plan__row_tokens=MICRO // 2 * (prompt + new),
        plan__micro_batch_tokens=MICRO * (prompt + new),
        plan__remat="full",
        learner__kl="k3",
        learner__kl_coef=0,
    )


def compare(*, work: str, model: str, sizes: Mapping[str, int]) -> Figures:
    """Measures both sides.

    Args:
        work: "decode" or "gradient".
        model: a name in `PUBLISHED`, or "small".
        sizes: see `SIZES`.

    Returns:
        Tokens a second, memory and, for gradients on a known GPU, MFU of both. `apart`: the
        difference of their mean log-probs of what ours sampled.
    """
    from launch.bench import torch_peer

    settings = PUBLISHED.get(model, SMALL)
    with TemporaryDirectory(prefix="gemma-grpo-torch-") as folder:
        _child(torch_peer.make_model, folder=folder, settings=settings)
        given: dict[str, Any] = {"folder": folder, "sizes": sizes}
        if work == "decode":
            ours, theirs = _child(decode, **given), _child(torch_peer.decode, **given)
        else:
            peer = {"micro": MICRO, "rank": make_config(sizes).lora.rank}
            ours = _child(gradient, **given)
            theirs = _child(torch_peer.gradient, **given, **peer)
    found: dict[str, Any] = {"how": ours["how"]}
    gpu, count = nvidia_gpus().gpu, sizes["rows"] * sizes["new"]
    for side, measured in (("ours", ours), ("theirs", theirs)):
        found[f"{side}_tokens_per_s"] = count / measured["seconds"]
        found[f"{side}_gib"] = measured["gib"]
        if work == "gradient" and gpu is not None:
            useful = _USEFUL * read_model_shape(settings).parameters * count
            flops = TOPOLOGIES[gpu].chip.bf16_flops * measured["seconds"]
            found[f"{side}_mfu"] = useful / flops
    found["ratio"] = theirs["seconds"] / ours["seconds"]
    if ours["gib"] and theirs["gib"]:
        found["memory_ratio"] = theirs["gib"] / ours["gib"]
    if work == "decode":
        found["apart"] = abs(ours["logprob"] - theirs["logprob"])
    return found


def _child(measure: Callable[..., Figures], **arguments: Any) -> Figures:
    return in_child(measure, arguments, environment={})


def decode(*, folder: str, sizes: Mapping[str, int]) -> Figures:
    """Seconds, memory, and the mean log-prob of the tokens, which are written to the folder."""
    case, drawn = _open(folder, sizes), list[Completion]()
    requests = [
        RolloutRequest(one.completion.name, one.completion.prompt_tokens) for one in case.rollouts
    ]
    engine = Engine(case.policy, case.base, case.config, VOCABULARY)

    def run() -> None:
        drawn[:] = engine.generate(
            requests, adapter=case.adapter, version=0, adapter_sha256="", temperature=1.0
        )

    found = _timed(run)
    tokens = np.stack([np.concatenate([one.prompt_tokens, one.tokens]) for one in drawn])
    np.save(Path(folder) / "decoded.npy", tokens)
    return {**found, "logprob": float(np.mean([one.logprobs for one in drawn]))}


def gradient(*, folder: str, sizes: Mapping[str, int]) -> Figures:
    """Seconds and memory; rows are packed and prompts shared, as in a run."""
    return _timed(_open(folder, sizes).ours().run)


def _open(folder: str, sizes: Mapping[str, int]) -> Case:
    """Random rollouts, and a model with a fresh adapter on one device."""
    config, rows = make_config(sizes), sizes["rows"]
    policy, base = open_policy(
        Path(folder), dtype="bfloat16", lora=config.lora, mesh=make_mesh(jax.devices()[:1])
    )
    rollouts = random_rollouts(
        rows * [sizes["new"]],
        prompt=sizes["prompt"],
        prompts=rows // GROUP,
        vocab=policy.vocab_size,
    )
    return Case(config, policy, VOCABULARY, base, policy.fresh_adapter(0), rollouts)


def _timed(run: Callable[[], object]) -> dict[str, Any]:
    run()
    seconds = medians({"run": run}, repeats=3)["run"]
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"seconds": seconds, "gib": None if peak is None else peak / GIB}


def benchmark(request: argparse.Namespace) -> Benchmark:
    """Rows for both shapes; quick: for a small model."""
    models = ("small",) if request.quick else ("gemma-3-270m", "gemma-3-1b")

    def section(work: str, title: str, *claims: Bound) -> Section:
        sizes = QUICK if request.quick else SIZES[work]
        given = {"work": work, "sizes": sizes}
        cost = 30 if request.quick else 105
        rows = [Row(model, compare, {"model": model, **given}, seconds=cost) for model in models]
        return Section(work, title.format(**sizes), rows, claims)

    return Benchmark(
        (
            section(
                "decode",
                "Sampled tokens a second of {rows} rollouts, {new} tokens after {prompt}, prefill "
                "included; the peer: `generate` with a static cache, without a LoRA",
                Bound("apart", most=APART),
            ),
            section(
                "gradient",
                "Learned tokens a second of {rows} rollouts, {new} tokens after {prompt}; the "
                "peer: LoRA modules and gradient checkpointing",
            ),
        ),
        needs=("torch", "transformers"),
        expected_on="two idle cores" if request.quick else "one H100 (reckoned)",
    )
