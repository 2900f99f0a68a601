"""`python -m launch.bench torch`: decoding and gradients beside a plain loop of transformers.

Both sides read the same random weights in bfloat16, each in a process of its own, and use the GPU
if there is one. Rollouts come in groups of eight with one prompt; the peer computes it for each of
them, as a plain loop does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from configs.machine import nvidia_gpus
from configs.schema import Config
from launch.bench.harness import Bound, Figures, Row, Section, in_child, medians
from launch.bench.learner import ours, random_rollouts
from launch.bench.shapes import GROUP, SMALL, VOCABULARY, Model, config_of
from pipeline.compute.decode.engine import Engine
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import open_policy
from pipeline.data.models.find_shape import PUBLISHED
from pipeline.data.models.hf_config import read_model_shape
from pipeline.plan.cost_model.hardware import TOPOLOGIES
from pipeline.plan.topology import GIB
from pipeline.types import Completion, Rollout, RolloutRequest

SIZES = {
    "decode": {"rows": 64, "prompt": 256, "new": 256, "micro": 4, "rank": 32},
    "gradient": {"rows": 32, "prompt": 256, "new": 768, "micro": 4, "rank": 32},
}
"""Rollouts, tokens of their prompts and completions, rows of a micro-batch of the peer's gradient
(ours has as many positions), rank of the LoRA."""
QUICK = {"rows": 8, "prompt": 24, "new": 16, "micro": 4, "rank": 32}
APART = 0.05
"""Largest difference of the mean log-prob of sampled tokens, both in bfloat16."""
_USEFUL = 4
"""Operations per learned token and parameter that count for MFU, as in a run's metrics."""


def make_config(sizes: Mapping[str, int]) -> Config:
    """The configuration of our side; each layer is recomputed."""
    positions = sizes["micro"] * (sizes["prompt"] + sizes["new"])
    return config_of(
        "gemma3-1b",
        device="auto",
        slots=sizes["rows"],
        prompt=sizes["prompt"],
        new=sizes["new"],
        model__dtype="bfloat16",
        plan__row_tokens=positions // 2,
        plan__micro_batch_tokens=positions,
        plan__remat="full",
    )


def compare(*, work: str, model: str, sizes: Mapping[str, int]) -> Figures:
    """Tokens a second, memory and, for gradients on a known GPU, MFU of both.

    `apart` is the difference of their mean log-probs of what ours sampled.
    """
    from launch.bench import torch_peer

    settings, both = PUBLISHED.get(model, SMALL), (decode, torch_peer.decode)
    if work == "gradient":
        both = (gradient, torch_peer.gradient)
    with TemporaryDirectory(prefix="gemma-grpo-torch-") as folder:
        given = {"folder": folder, "sizes": sizes}
        in_child(torch_peer.make_model, {"folder": folder, "settings": settings}, environment={})
        we, they = (in_child(side, given, environment={}) for side in both)
    found: dict[str, Any] = {"how": we["how"]}
    gpu, count = nvidia_gpus().gpu, sizes["rows"] * sizes["new"]
    for side, measured in (("ours", we), ("theirs", they)):
        found[f"{side}_tokens_per_s"] = count / measured["seconds"]
        found[f"{side}_gib"] = measured["gib"]
        if work == "gradient" and gpu is not None:
            useful = _USEFUL * read_model_shape(settings).parameters * count
            flops = TOPOLOGIES[gpu].chip.bf16_flops * measured["seconds"]
            found[f"{side}_mfu"] = useful / flops
    found["ratio"] = they["seconds"] / we["seconds"]
    if we["gib"] and they["gib"]:
        found["memory_ratio"] = they["gib"] / we["gib"]
    if work == "decode":
        found["apart"] = abs(we["logprob"] - they["logprob"])
    return found


def decode(*, folder: str, sizes: Mapping[str, int]) -> Figures:
    """Seconds, memory, and the mean log-prob of the tokens, which are written to the folder."""
    config, (policy, base, adapter), rollouts = _open(folder, sizes)
    engine, drawn = Engine(policy, base, config, VOCABULARY), list[Completion]()
    requests = [
        RolloutRequest(one.completion.name, one.completion.prompt_tokens) for one in rollouts
    ]

    def run() -> None:
        drawn[:] = engine.generate(
            requests, adapter=adapter, version=0, adapter_sha256="", temperature=1.0
        )

    found = _timed(run)
    tokens = np.stack([np.concatenate([one.prompt_tokens, one.tokens]) for one in drawn])
    np.save(Path(folder) / "decoded.npy", tokens)
    return {**found, "logprob": float(np.mean([one.logprobs for one in drawn]))}


def gradient(*, folder: str, sizes: Mapping[str, int]) -> Figures:
    """Seconds and memory; rows are packed and prompts shared, as in a run."""
    return _timed(ours(*_open(folder, sizes)).run)


def _open(folder: str, sizes: Mapping[str, int]) -> tuple[Config, Model, Sequence[Rollout]]:
    """A model with a fresh adapter on one device, and random rollouts."""
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
    return config, (policy, base, policy.fresh_adapter(0)), rollouts


def _timed(run: Callable[[], object]) -> dict[str, Any]:
    run()
    seconds = medians({"run": run}, repeats=3)["run"]
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"seconds": seconds, "gib": None if peak is None else peak / GIB}


def sections(request: argparse.Namespace) -> list[Section]:
    """A row for each model, for decoding and for the gradient; quick: for a small model."""
    titles = {
        "decode": "Sampled tokens a second of {rows} rollouts, {new} tokens after {prompt}, "
        "prefill included; the peer: `generate` with a static cache, without a LoRA",
        "gradient": "Learned tokens a second of {rows} rollouts, {new} tokens after {prompt}; the "
        "peer: LoRA modules and gradient checkpointing",
    }
    claims = {"decode": [Bound("apart", most=APART)], "gradient": []}
    models, seconds = ["gemma-3-270m", "gemma-3-1b"], 105
    if request.quick:
        models, seconds = ["small"], 30
    found = []
    for work, title in titles.items():
        sizes = QUICK if request.quick else SIZES[work]
        rows = [
            Row(model, compare, {"model": model, "work": work, "sizes": sizes}, seconds)
            for model in models
        ]
        found.append(Section(work, title.format(**sizes), rows, claims[work]))
    return found
