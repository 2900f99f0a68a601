"""Our programs compiled for a v5e chip: the learner's gradient, and the head alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from launch.bench.compiled import figures
from launch.bench.models import MODELS, VOCAB, bench_config, own_sizes
from pipeline.compute.aot.compile import VOCABULARY, compile_for, v5e_devices
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.head import Head, score
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.sharding import BATCH_AXES, make_mesh


def gradient(
    *,
    model: str,
    sequences: int,
    length: int,
    devices: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Returns figures of the learner's gradient program on `sequences` of `length` tokens a chip.

    One backward pass for all of them. Adam's moments, two float32 values per adapter parameter, are
    added to the memory.
    """
    config = bench_config(
        model,
        length=length,
        plan__learner_devices=devices,
        plan__micro_batch_tokens=sequences * length * devices,
        **settings,
    )
    mesh = make_mesh(v5e_devices(devices), fsdp=config.plan.fsdp, tp=config.plan.tp)
    policy = Policy(
        architecture(MODELS[model], dtype=jnp.dtype("bfloat16")),
        lora=config.lora,
        mesh=mesh,
        quantization=config.model.quantization,
    )
    programs = LearnerPrograms(policy, config, VOCABULARY)
    rows = sequences * devices
    assert max(programs.shape.sizes) == rows, (programs.shape.sizes, rows)
    moments = 2 * sum(4 * shape.size for shape in policy.adapter_shapes.values())
    found = figures(
        lambda: compile_for(programs.trace_gradient(rows)),
        tokens=sequences * length,
        vocab=VOCAB // (config.plan.fsdp * config.plan.tp),
        model=own_sizes(model),
        optimizer_bytes=moments,
    )
    return {"tokens": sequences * length, **found}


def head(
    *, model: str, tokens: int, what: str, head_tokens: int, head_vocab: int, k: int = 128
) -> dict[str, Any]:
    """Returns figures of the head as a separate program.

    Args:
        model: gives the width.
        tokens: positions.
        what: "gradient": log-probs and the gradient of their sum; "top_k": the likeliest `k`.
        head_tokens: block of positions.
        head_vocab: block of the vocabulary.
        k: number of the likeliest tokens.
    """
    width, _ = own_sizes(model)
    mesh = make_mesh(v5e_devices(1))
    settings = Head(softcap=None, temperature=1.0, tokens=head_tokens, vocab=head_vocab, mesh=mesh)
    scores = partial(score, head=settings, forbidden=VOCABULARY.forbidden_mask(VOCAB))

    def logprobs_and_gradient(hidden: Any, targets: Any, embedding: Any) -> Any:
        def total(hidden: Any) -> Any:
            logprobs = scores(hidden, targets, embedding).logprobs
            return logprobs.sum(), logprobs

        return jax.value_and_grad(total, has_aux=True)(hidden)

    def likeliest(hidden: Any, targets: Any, embedding: Any) -> Any:
        return scores(hidden, targets, embedding, top_k=k).top

    def array(shape: tuple[int, ...], dtype: Any, *axes: Any) -> Any:
        place = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    function = {"gradient": logprobs_and_gradient, "top_k": likeliest}[what]
    rows = tokens // 1024
    traced = partial(
        jax.jit(function).trace,
        array((rows, 1024, width), jnp.bfloat16, BATCH_AXES),
        array((rows, 1024), jnp.int32, BATCH_AXES),
        array((VOCAB, width), jnp.bfloat16),
    )
    found = figures(
        lambda: compile_for(traced()), tokens=tokens, vocab=VOCAB, model=own_sizes(model)
    )
    return {"tokens": tokens, **found}
