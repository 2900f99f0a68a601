"""The compiled programs of a run, what each depends on, and the time of compiling them.

For names see `pipeline.plan.program_names`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from configs.schema import Config
from pipeline.data.batching import Packing, batch_shape
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.cost_model.hardware import Chip
from pipeline.plan.cost_model.roofline import Seconds, fixed_time
from pipeline.plan.lengths import Lengths
from pipeline.plan.program_names import SAMPLER, devices_of, split_name

# Settings that a kind of program does not depend on. All others count, so a new setting counts by
# default.
_PLACES = {"learner_devices", "samplers", "sampler_devices", "fsdp", "tp", "sampler_tp"}
_DECIDES = {"placement", "chip_hour_usd", "hbm_gib"}
_NOT_COMPILED = {"prompt_buckets", "slot_buckets"} | _DECIDES | _PLACES
_OF_LEARNER = {"micro_batch_tokens", "row_tokens", "remat", "layer_tokens", "attention"}
_OF_SAMPLER = {
    "slots",
    "kv_cache",
    "rollout_weights",
    "segment_steps",
    "prefill_tokens",
}
_WORDS = {"stop_tokens", "stop_strings", "forbidden_tokens"}
_OF_STEP = {
    *("group_size", "prompts_per_step", "min_prompts_per_step", "max_prompts_per_step"),
    *("dynamic_sampling", "ahead", "overlong_tokens", "partial", "cut_off"),
    *_WORDS,
}
_ROLLOUT = {
    "sampler": _OF_STEP | {"temperature"},
    "learner": _OF_STEP | {"max_prompt_tokens", "max_new_tokens", "top_k", "top_p", "min_p"},
}
_RATE = {"lr", "schedule", "warmup_steps", "decay_steps"}
"""Settings of the learning rate, which is an argument of `apply`."""
_OF_UPDATE = _RATE | {"weight_decay", "adam_b1", "adam_b2", "max_grad_norm"}
_OF_HEAD = {"head_tokens", "head_vocab"}


_COMPILE_S_TPU = {
    "gradient": 2.0,
    "sft_gradient": 2.0,
    "segment": 1.2,
    "prefill": 0.8,
    "score": 0.8,
    "reference_top_k": 1.0,
    "apply": 0.3,
    "apply_sft": 0.3,
    "fill": 0.2,
    "compact": 0.05,
    "empty": 0.05,
}
_COMPILE_S_CPU = {
    "gradient": 1.05,
    "sft_gradient": 0.9,
    "segment": 0.38,
    "prefill": 0.2,
    "score": 0.32,
    "reference_top_k": 0.3,
    "apply": 0.28,
    "apply_sft": 0.28,
    "fill": 0.06,
    "compact": 0.015,
    "empty": 0.03,
}
"""Seconds per layer of the model, by kind of program, on two cores. Those of the CPU were measured
on the demo's model only."""


def programs_of(config: Config) -> tuple[str, ...]:
    """Programs that the TPU compiler can compile by name; `built_programs` lists all programs."""
    buckets, sizes = config.prompt_buckets, batch_shape(config, pad=0).sizes
    learner = ["score", "gradient"]
    learner += ["reference_top_k"] if config.learner.uses_reference_top_k else []
    learner += ["sft_gradient"] if config.run.has_sft_phase else []
    return (
        "empty",
        *(f"prefill {bucket}" for bucket in buckets),
        *(f"fill {bucket}" for bucket in buckets),
        *(f"segment {slots}" for slots in config.plan.slot_ladder),
        *(f"{kind} {rows}" for kind in learner for rows in sizes),
        "apply",
    )


def phase_programs(config: Config) -> dict[str, tuple[str, ...]]:
    """The programs of each phase of a step at its largest sizes, the largest program last."""
    rows, scoring = config.micro_batch_rows, ["score"]
    scoring += ["reference_top_k"] if config.learner.uses_reference_top_k else []
    return {
        "prefill": tuple(f"prefill {bucket}" for bucket in sorted(config.prompt_buckets)),
        "decode": (f"segment {config.slots}",),
        "score": tuple(f"{kind} {rows}" for kind in scoring),
        "update": (f"gradient {rows}",),
    }


def built_programs(config: Config, shape: ModelShape) -> tuple[str, ...]:
    """All programs that samplers and learner compile, by their names in `BuildLog`, once each.

    Merging and quantizing weights is not logged. Compaction is one program for the state outside of
    the caches, and one for each shape of ring cache.
    """
    longest = config.rollout.max_tokens
    rings = {
        (min(shape.window, longest) if shape.local[layer] else longest, shape.head_dim_of(layer))
        for layer in shape.kv_layers
    }
    named = ["empty slots" if name == "empty" else name for name in programs_of(config)]
    named += ["apply_sft"] if config.run.has_sft_phase else []
    for slots in config.plan.slot_ladder[1:]:
        named.append(f"compact {slots} slots")
        named += [
            f"compact {slots} rings of {shape.kv_heads}x{positions}x{head_dim}"
            for positions, head_dim in sorted(rings)
        ]
    return tuple(named)


def depends_on(config: Config, shape: ModelShape, program: str) -> dict[str, Any]:
    """Values of configuration and model that can change a program or its times, as JSON."""
    kind, size = split_name(program)
    found: dict[str, Any] = {
        "program": program,
        "devices": asdict(devices_of(config, program)),
        "shape": {**asdict(shape), "local": list(shape.local)},
        "model": {"dtype": config.model.dtype, "quantization": config.model.quantization},
        "lora": _without(config.lora, {"start"}),
    }
    if kind in SAMPLER:
        ignored = _NOT_COMPILED | _OF_LEARNER
        if kind in {"prefill", "fill"}:
            found["prompts"] = config.prefill_rows(size)
            ignored |= {"prefill_tokens", "segment_steps"}
        if kind in {"prefill", "segment"}:
            ignored |= {"slots"}
        if kind == "segment":
            found["segment_steps"] = config.segment_steps
            ignored |= {"prefill_tokens", "segment_steps"}
        elif kind != "empty":
            ignored |= _OF_HEAD
        found["plan"] = _without(config.plan, ignored)
        found["rollout"] = _without(config.rollout, _ROLLOUT["sampler"])
        return found
    found["plan"] = _without(config.plan, _NOT_COMPILED | _OF_SAMPLER | {"micro_batch_tokens"})
    found["row_tokens"], found["share_prefix"] = config.row_tokens, config.shares_prefix
    found["learned"] = round(Packing.expected(config, Lengths.expected(config)).learned, 2)
    found["rollout"] = _without(config.rollout, _ROLLOUT["learner"])
    found["learner"] = _without(config.learner, _RATE if kind == "apply" else _OF_UPDATE)
    found["learner"]["teacher"] = config.learner.teacher is not None
    found["learner"]["kl_coef"] = config.learner.kl_coef > 0  # its value is an argument
    return found


def _without(table: Any, ignored: Collection[str]) -> dict[str, Any]:
    values: dict[str, Any] = table.model_dump(mode="json")
    return {key: value for key, value in values.items() if key not in ignored}


def compile_s(names: Sequence[str], shape: ModelShape, *, chip: Chip) -> Seconds:
    """Seconds of tracing and compiling programs one after the other.

    Cached programs take less, busy cores take longer.

    Args:
        names: names of programs, as in `built_programs`.
        shape: the model.
        chip: the target of compilation.
    """
    by_kind = _COMPILE_S_CPU if chip.platform == "cpu" else _COMPILE_S_TPU
    per_layer = sum(by_kind[name.partition(" ")[0]] for name in names)
    return fixed_time(per_layer * shape.layers, chip=chip)
