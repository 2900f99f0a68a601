"""The models of the studies, with random weights, and their configurations on one device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import configs
from configs.load import load_config
from configs.machine import this_machine
from configs.schema import Config
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.data.models.find_shape import PUBLISHED

SMALL: dict[str, Any] = PUBLISHED["gemma-3-270m"] | {
    "vocab_size": 512,
    "num_hidden_layers": 7,
    "hidden_size": 128,
    "intermediate_size": 512,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
}
SMALLEST = "small"
SHAPES: Mapping[str, Mapping[str, Any]] = {
    SMALLEST: SMALL,
    "gemma3-270m": PUBLISHED["gemma-3-270m"],
    "gemma3-1b": PUBLISHED["gemma-3-1b"],
    "gemma2-2b": PUBLISHED["gemma-2-2b"],
}
"""`config.json` by name; `SMALLEST` has no preset, and is never compiled for a TPU."""

GROUP, PREFILLED = 8, 16
"""Rollouts of a prompt, and prompts of a prefill."""
VOCABULARY = Vocabulary(pad=0, stops=(1,), forbidden=(0, 1))
"""Stop tokens are forbidden, so that a rollout has exactly the requested length."""
COMPILER = "compiler"
"""The device of figures by the TPU compiler; any other is this machine's."""

Model = tuple[Policy, Params, Params]
"""A policy, its base and an adapter."""


def one_device(name: str, *, slots: int, prompt: int, new: int, **changes: Any) -> Config:
    """A preset's configuration for one device with one bucket of slots and of prompts.

    Args:
        name: of the preset.
        slots: all filled at once, by prefills of at most `PREFILLED` prompts.
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
    overrides = [
        (key.replace("__", "."), str(value)) for key, value in (settings | changes).items()
    ]
    return load_config(Path(configs.__file__).parent / f"{name}.toml", overrides)


def prefilled(slots: int) -> int:
    """Prompts of a prefill for this number of slots."""
    return min(PREFILLED, math.ceil(slots / GROUP))


def config_of(
    model: str, *, device: str, slots: int, prompt: int, new: int, **changes: Any
) -> Config:
    """`one_device` for a model with a LoRA of rank 32.

    The model is a key of `SHAPES`, for `COMPILER` any with a preset for a v5e-8, whose layers are
    all rematerialized.
    """
    preset, settings = "demo", dict[str, Any](lora__rank=32, lora__alpha=64.0)
    if device == COMPILER:
        preset = f"{model.replace('-', '_')}_gsm8k_v5e8"
        settings["plan__remat"] = "full"
    else:
        on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
        platform = "cpu" if on_cpu else this_machine().platform
        settings["plan__platform"] = platform
        settings["model__dtype"] = "float32" if platform == "cpu" else "bfloat16"
    return one_device(preset, slots=slots, prompt=prompt, new=new, **settings | changes)


def policy_of(
    settings: Mapping[str, Any],
    config: Config,
    devices: Sequence[jax.Device],
    kind: Callable[..., Policy] = Policy,
) -> Policy:
    """A model, by its `config.json`, on these devices, without values."""
    return kind(
        architecture(settings, dtype=jnp.dtype(config.model.dtype)),
        lora=config.lora,
        mesh=make_mesh(devices, fsdp=config.plan.fsdp, tp=config.plan.tp),
        quantization=config.model.quantization,
    )


def random_model(settings: Mapping[str, Any], config: Config, *, embedding: float = 0.1) -> Model:
    """A model on the first device with normal weights and a normal LoRA, the same at each call.

    `embedding` is the standard deviation of the tied embedding; of the others it is 0.1, of 8-bit
    numbers 30.
    """
    policy = policy_of(settings, config, jax.devices()[:1])
    rng = np.random.default_rng(0)

    def normal(kept: jax.ShapeDtypeStruct, scale: float) -> np.ndarray:
        return scale * rng.standard_normal(kept.shape, np.float32)

    base = {}
    for name, kept in sorted(policy.base_shapes.items()):
        other = 30.0 if kept.dtype == jnp.int8 else 0.1
        scale = embedding if name == "embedder.input_embedding" else other
        base[name] = jnp.asarray(normal(kept, scale), kept.dtype)
    adapter = {name: normal(kept, 0.1) for name, kept in sorted(policy.adapter_shapes.items())}
    return policy, base, policy.place_adapter(adapter)
