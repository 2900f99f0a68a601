"""What a sampler of a shape costs: measured with random weights, or compiled for a v5e."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from configs.machine import this_machine
from configs.schema import Config, Lora
from launch.bench.harness import Figures, Row
from launch.bench.small_gemma import (
    GROUP,
    PREFILLED,
    SMALL,
    VOCABULARY,
    one_device,
    random_policy,
)
from launch.bench.v5e import figures, v5e_config
from pipeline.compute.decode.engine import Engine
from pipeline.compute.decode.rollout_weights import RolloutWeights, rollout_policy
from pipeline.compute.device_memory import array_bytes, is_out_of_memory
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.data.models.find_shape import PUBLISHED, shape_of
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

POINT_S = {SMALLEST: 5, "gemma3-270m": 30, "gemma3-1b": 40, "gemma2-2b": 60}
"""Seconds of one measured size of a program, mostly of compilation; see `expected_on`."""

COMPILER = "compiler"
"""The device of figures by the TPU compiler."""


@dataclass(frozen=True)
class Sampler:
    """What a sampler costs with all slots busy.

    Attributes:
        step_s: seconds of a decode step.
        prefill_s: of a prefill, and of filling slots.
        prefills: of all slots.
        gib: memory of the device.
    """

    step_s: float
    prefill_s: float
    prefills: int
    gib: float

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
    if device == COMPILER:
        return v5e_config(MODELS[model], slots=slots, prompt=prompt, new=new, **changes)
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    platform = "cpu" if on_cpu else this_machine().platform
    here = {
        "model__dtype": "float32" if platform == "cpu" else "bfloat16",
        "lora__rank": 32,
        "lora__alpha": 64.0,
        "plan__platform": platform,
    }
    return one_device("demo", slots=slots, prompt=prompt, new=new, **here | changes)


def sampler(
    model: str,
    config: Config,
    *,
    device: str,
    adapter: bool = True,
    parts: Collection[str] = ("segment", "prefill"),
    rings: bool = True,
) -> Sampler:
    """The costs of a sampler.

    Args:
        model: as in `config_of`.
        config: from it.
        device: as in `config_of`.
        adapter: whether it decodes with a LoRA; always when compiled.
        parts: that are compiled; the others take 0 seconds.
        rings: caches of sliding layers hold a window; else all positions.

    Raises:
        MemoryError: if it does not fit.
    """
    (bucket,) = config.prompt_buckets
    names = {"segment": f"segment {config.slots}", "prefill": f"prefill {bucket}"}
    prefills = math.ceil(math.ceil(config.slots / GROUP) / PREFILLED)
    if device == COMPILER:
        shape = shape_of(config)
        shape = shape if rings else replace(shape, window=config.rollout.max_tokens)
        found = {part: figures(config, names[part], shape=shape) for part in parts}
        if not all(one["fits"] for one in found.values()):
            raise MemoryError
        seconds = {part: one["ms"] / 1e3 for part, one in found.items()}
        gib = max(one["gib"] for one in found.values())
    else:
        with out_of_memory():
            seconds, gib = _measured(model, config, adapter=adapter, rings=rings)
    step_s = seconds.get("segment", 0.0) / config.segment_steps
    return Sampler(step_s, seconds.get("prefill", 0.0), prefills, gib)


def curve(
    model: str,
    settings: Mapping[str, Any],
    *,
    device: str,
    slots: Sequence[int],
    prompt: int,
    new: int,
    **how: Any,
) -> Iterator[tuple[int, Sampler]]:
    """Each number of slots, and the costs of such a sampler, until one does not fit.

    Args:
        model: as in `config_of`.
        settings: its other settings.
        device: as in `config_of`.
        slots: ascending.
        prompt: tokens of a prompt.
        new: tokens of a completion.
        how: of `sampler`.
    """
    for count in slots:
        config = config_of(model, device=device, slots=count, prompt=prompt, new=new, **settings)
        try:
            yield count, sampler(model, config, device=device, **how)
        except MemoryError:
            return


def _measured(
    model: str, config: Config, *, adapter: bool, rings: bool
) -> tuple[dict[str, float], float]:
    """Seconds by part, and GiB."""
    policy, base, lora = random_model(
        model, config, window=None if rings else config.rollout.max_tokens
    )
    if not adapter:
        policy, lora = policy.without_adapter(), {}
    engine = Engine(rollout_policy(policy, config), None, config, VOCABULARY)
    weights = RolloutWeights(policy, base, config)
    weights.load(lora)
    times = engine.times(weights.base, weights.adapter)
    needed = array_bytes((weights.base, weights.adapter)) + max(engine.needs.values())
    (prefill_s,) = times.prefill_s.values()
    return {"segment": times.segment_s[config.slots], "prefill": prefill_s}, peak_gib(needed)


@contextmanager
def out_of_memory() -> Iterator[None]:
    """Raises `MemoryError` where JAX reports a lack of memory in its own way."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(str(error)) from None


def peak_gib(needed: int) -> float:
    """The device's peak in GiB where it reports one, else the bytes that programs need."""
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return (needed if peak is None else peak) / GIB


def random_model(
    model: str, config: Config, *, window: int | None = None
) -> tuple[Policy, Params, Params]:
    """Policy, base and LoRA with random values on the first device; the last ones are kept.

    Args:
        model: as in `config_of`.
        config: gives dtype, quantization and LoRA.
        window: of sliding layers; None: the model's.
    """
    return _random_model(model, config.model.dtype, config.lora, config.model.quantization, window)


@lru_cache(maxsize=1)
def _random_model(
    model: str, dtype: str, lora: Lora, quantization: str, window: int | None
) -> tuple[Policy, Params, Params]:
    settings = SHAPES[model] if window is None else {**SHAPES[model], "sliding_window": window}
    return random_policy(settings, dtype, lora, scales={}, quantization=quantization)


def policy_of(model: str, config: Config, devices: Sequence[jax.Device]) -> Policy:
    """The model on these devices, without values."""
    shape = architecture(SHAPES[model], dtype=jnp.dtype(config.model.dtype))
    return Policy(shape, lora=config.lora, mesh=make_mesh(devices))


def chosen_models(request: argparse.Namespace) -> Sequence[str]:
    """The models of a study: all, or with `--quick` the small one."""
    return [SMALLEST] if request.quick else list(MODELS)


def study_row(
    request: argparse.Namespace,
    model: str,
    name: str,
    measure: Callable[..., Figures],
    arguments: Mapping[str, Any],
    *,
    sizes: int,
    programs: int,
) -> Row:
    """A row of a study, with what it is expected to take.

    Args:
        request: of the study.
        model: of the row.
        name: of the row, without the model's.
        measure: gets the model and the device, too.
        arguments: its other arguments.
        sizes: that are measured.
        programs: that are compiled where the device is the compiler.
    """
    compiled = request.device == COMPILER
    return Row(
        f"{model}{name}",
        measure,
        {"model": model, "device": request.device, **arguments},
        seconds=0.0 if compiled else POINT_S[model] * sizes,
        programs=programs if compiled else 0,
    )


def expected_on(request: argparse.Namespace) -> str:
    """The machine of `POINT_S` and of the TPU compiler's seconds."""
    here = request.quick or request.device == COMPILER
    return "two idle cores" if here else "one H100 (reckoned)"
