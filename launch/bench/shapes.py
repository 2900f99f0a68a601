"""What a sampler of a shape costs: measured with random weights, or compiled for a v5e."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.machine import this_machine
from configs.schema import Config
from launch.bench.small_gemma import SMALL, VOCABULARY, preset, random_weights
from launch.bench.v5e import figures, v5e_config
from pipeline.compute.decode.engine import Engine
from pipeline.compute.decode.rollout_weights import RolloutWeights, rollout_policy
from pipeline.compute.device_memory import array_bytes, is_out_of_memory
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.data.models.find_shape import PUBLISHED
from pipeline.plan.topology import GIB

SMALLEST = "small"
MODELS: Mapping[str, str] = {
    "gemma3-270m": "gemma3_270m",
    "gemma3-1b": "gemma3_1b",
    "gemma2-2b": "gemma2_2b",
}
"""Presets by name of a shape; `SMALLEST` has none, and is never compiled for a TPU."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    SMALLEST: SMALL,
    "gemma3-270m": PUBLISHED["gemma-3-270m"],
    "gemma3-1b": PUBLISHED["gemma-3-1b"],
    "gemma2-2b": PUBLISHED["gemma-2-2b"],
}
"""`config.json` by name."""

COMPILER = "compiler"
"""The device of figures by the TPU compiler."""
GROUP = 8
"""Rollouts of a prompt."""
_PREFILLED = 16
"""Prompts of a prefill."""


@dataclass(frozen=True)
class Sampler:
    """What a sampler costs with all slots busy.

    Attributes:
        step_s: seconds of a decode step.
        prefill_s: of a prefill, and of filling slots.
        prefills: of all slots.
        gib: memory of the device.
        how: "measured" or "compiled", and the device.
    """

    step_s: float
    prefill_s: float
    prefills: int
    gib: float
    how: str

    def elapsed_s(self, new: int) -> float:
        """Seconds until every slot has `new` tokens."""
        return self.prefills * self.prefill_s + new * self.step_s


def config_of(
    model: str, *, device: str, slots: int, prompt: int, new: int, **changes: Any
) -> Config:
    """The configuration of a sampler on one device.

    Args:
        model: a key of `MODELS`, or `SMALLEST`.
        device: `COMPILER`, or anything else for that of this machine.
        slots: all filled at once.
        prompt: tokens of a prompt.
        new: tokens of a completion.
        changes: other settings, as `table__key=value`.
    """
    rows = min(_PREFILLED, math.ceil(slots / GROUP))
    sizes = {
        "rollout__group_size": GROUP,
        "rollout__max_prompt_tokens": prompt,
        "rollout__max_new_tokens": new,
        "plan__slots": slots,
        "plan__slot_buckets": [],
        "plan__prompt_buckets": [],
        "plan__prefill_tokens": rows * prompt,
        "plan__segment_steps": min(32, new),
        **changes,
    }
    if device == COMPILER:
        return v5e_config(MODELS[model], length=prompt + new, **sizes)
    platform = this_machine().platform
    here = {
        "model__dtype": "float32" if platform == "cpu" else "bfloat16",
        "lora__rank": 32,
        "lora__alpha": 64.0,
        "plan__platform": platform,
        "plan__placement": "colocated",
        "plan__samplers": "none",
        "plan__sampler_devices": "none",
        "plan__learner_devices": 1,
        "plan__row_tokens": prompt + new,
        "plan__micro_batch_tokens": prompt + new,
    }
    return preset("demo", **(here | sizes))


def sampler(model: str, config: Config, *, device: str, adapter: bool = True) -> Sampler:
    """The costs of a sampler.

    Args:
        model: as in `config_of`.
        config: from it.
        device: as in `config_of`.
        adapter: whether it decodes with a LoRA; always when compiled.

    Raises:
        ValueError: if it does not fit into the memory.
    """
    try:
        return _sampler(model, config, device=device, adapter=adapter)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"does not fit: {error}") from None


def _sampler(model: str, config: Config, *, device: str, adapter: bool) -> Sampler:
    prefills = math.ceil(math.ceil(config.slots / GROUP) / _PREFILLED)
    (bucket,) = config.prompt_buckets
    if device == COMPILER:
        decoded = figures(config, f"segment {config.slots}")
        read = figures(config, f"prefill {bucket}")
        if not (decoded["fits"] and read["fits"]):
            raise ValueError(f"does not fit: {decoded['gib'] or read['gib']} GiB")
        step_s = decoded["ms"] / config.segment_steps / 1e3
        gib = max(decoded["gib"], read["gib"])
        return Sampler(step_s, read["ms"] / 1e3, prefills, gib, "compiled for a v5e")
    policy, base, lora = random_model(model, config)
    if not adapter:
        policy, lora = policy.without_adapter(), {}
    engine = Engine(rollout_policy(policy, config), None, config, VOCABULARY)
    weights = RolloutWeights(policy, base, config)
    weights.load(lora)
    times = engine.times(weights.base, weights.adapter)
    chip = jax.devices()[0]
    peak = (chip.memory_stats() or {}).get("peak_bytes_in_use")
    compiled = array_bytes((weights.base, weights.adapter)) + max(engine.needs.values())
    return Sampler(
        times.segment_s[config.slots] / config.segment_steps,
        times.prefill_s[bucket],
        prefills,
        (compiled if peak is None else peak) / GIB,
        f"measured on {chip.device_kind}",
    )


def random_model(model: str, config: Config) -> tuple[Policy, Params, Params]:
    """Policy, base and LoRA with random values on the first device."""
    policy = policy_of(model, config, jax.devices()[:1])
    return policy, *random_weights(policy, np.random.default_rng(0), scales={})


def policy_of(model: str, config: Config, devices: Sequence[jax.Device]) -> Policy:
    """The model on these devices, without values."""
    shape = architecture(SHAPES[model], dtype=jnp.dtype(config.model.dtype))
    return Policy(shape, lora=config.lora, mesh=make_mesh(devices))


def chosen_models(request: argparse.Namespace) -> Sequence[str]:
    """The models that `--models` names; all without it.

    Raises:
        ValueError: if one is not a key of `MODELS`, or with `--quick`, which has one model.
    """
    if request.quick:
        if request.models or request.device == COMPILER:
            raise ValueError(
                "command line: --quick measures one small model on this device; remove --models "
                "and --device"
            )
        return [SMALLEST]
    unknown = [name for name in request.models or () if name not in MODELS]
    if unknown:
        known = ", ".join(MODELS)
        raise ValueError(f"command line: --models {unknown[0]}: no such shape; there are {known}")
    return request.models or list(MODELS)
