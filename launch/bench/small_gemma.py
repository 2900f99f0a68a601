"""A small Gemma 3 with random weights, and rollouts of given lengths: the cases of CPU benchmarks.

Stop tokens are forbidden, so that a rollout has exactly the requested length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import configs
from configs.load import load_config
from configs.schema import Config, Lora
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.types import RolloutName, RolloutRequest

SMALL: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 512,
    "num_hidden_layers": 7,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""`config.json` of the model."""

GROUP, PREFILLED = 8, 16
"""Rollouts of a prompt, and prompts of a prefill."""
SLOTS, SEGMENT = 16, 8
PROMPT, NEW = 64, 256
"""Largest lengths of a prompt, which has at least half of it, and of a completion."""
SPREAD, MEDIAN = 0.8, 0.272
"""Lognormal length of a completion: standard deviation of the logarithm, and median as a share of
`NEW`. Truncated at `NEW`, the mean is 0.35 of it."""
VOCABULARY = Vocabulary(pad=0, stops=(1,), forbidden=(0, 1))
_EMBEDDING = {"embedder.input_embedding": 0.03}
"""Scale of the tied embedding; a larger one makes every token repeat."""


def preset(name: str, **changes: Any) -> Config:
    """Returns a preset's configuration, with changes as `table__key=value`."""
    overrides = [(key.replace("__", "."), str(value)) for key, value in changes.items()]
    return load_config(Path(configs.__file__).parent / f"{name}.toml", overrides)


def one_device(name: str, *, slots: int, prompt: int, new: int, **changes: Any) -> Config:
    """Returns a preset's configuration for one device with one bucket of slots and of prompts.

    Args:
        name: of the preset.
        slots: filled by prefills of at most `PREFILLED` prompts.
        prompt: tokens of a prompt, at most.
        new: tokens of a completion, at most.
        changes: other settings, as `table__key=value`.
    """
    settings = {
        "rollout__group_size": GROUP,
        "rollout__max_prompt_tokens": prompt,
        "rollout__max_new_tokens": new,
        "plan__placement": "colocated",
        "plan__samplers": "none",
        "plan__sampler_devices": "none",
        "plan__learner_devices": 1,
        "plan__slots": slots,
        "plan__slot_buckets": [],
        "plan__prompt_buckets": [],
        "plan__segment_steps": min(32, new),
        "plan__prefill_tokens": prefilled(slots) * prompt,
        "plan__row_tokens": prompt + new,
        "plan__micro_batch_tokens": prompt + new,
    }
    return preset(name, **settings | changes)


def prefilled(slots: int) -> int:
    """Prompts of a prefill for this number of slots."""
    return min(PREFILLED, math.ceil(slots / GROUP))


def small_config(**changes: Any) -> Config:
    """Returns the configuration of sampler and learner, with changes as `table__key=value`."""
    own = {"plan__slot_buckets": "none", "plan__segment_steps": SEGMENT}
    return one_device("demo", slots=SLOTS, prompt=PROMPT, new=NEW, **own | changes)


def small_policy(config: Config) -> tuple[Policy, Params, Params]:
    """Returns the policy, random weights and a non-zero LoRA, the same at each call."""
    policy, base, adapter = random_policy(SMALL, "float32", config.lora, scales=_EMBEDDING)
    # Logits with a standard deviation of about 1.
    return policy, {**base, "final_norm.scale": base["final_norm.scale"] + 2.0}, adapter


def random_policy(
    settings: Mapping[str, Any],
    dtype: str,
    lora: Lora,
    *,
    scales: Mapping[str, float],
    quantization: str = "none",
) -> tuple[Policy, Params, Params]:
    """Returns a policy on the first device, normal weights and a normal LoRA.

    Args:
        settings: `config.json` of the model.
        dtype: of the base.
        lora: of the adapter.
        scales: standard deviations by name; of the others 0.1, of 8-bit numbers 30.
        quantization: of the base.
    """
    policy = Policy(
        architecture(settings, dtype=jnp.dtype(dtype)),
        lora=lora,
        mesh=make_mesh(jax.devices()[:1]),
        quantization=quantization,
    )
    rng = np.random.default_rng(0)
    small = {name: 30.0 for name, kept in policy.base_shapes.items() if kept.dtype == jnp.int8}
    scales = {**small, **scales}
    base = {
        name: jnp.asarray(
            scales.get(name, 0.1) * rng.standard_normal(kept.shape, np.float32), kept.dtype
        )
        for name, kept in sorted(policy.base_shapes.items())
    }
    adapter = {
        name: 0.1 * rng.standard_normal(kept.shape, np.float32)
        for name, kept in sorted(policy.adapter_shapes.items())
    }
    return policy, base, policy.place_adapter(adapter)


def make_requests(lengths: Sequence[int]) -> list[RolloutRequest]:
    """Returns requests of these lengths; `GROUP` consecutive ones have the same prompt."""
    rng = np.random.default_rng(1)
    requests = []
    for first in range(0, len(lengths), GROUP):
        size = rng.integers(PROMPT // 2, PROMPT + 1)
        tokens = rng.integers(2, SMALL["vocab_size"], size).astype(np.int32)
        requests += [
            RolloutRequest(RolloutName("train", 0, first // GROUP, sample), tokens, int(length))
            for sample, length in enumerate(lengths[first : first + GROUP])
        ]
    return requests


def make_lengths(count: int) -> np.ndarray:
    """Returns `count` lognormal lengths, truncated at `NEW`; the same at each call."""
    lengths = np.random.default_rng(2).lognormal(math.log(MEDIAN * NEW), SPREAD, count)
    return np.clip(lengths.round(), 1, NEW).astype(int)
