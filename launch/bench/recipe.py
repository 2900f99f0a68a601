"""A frozen teacher's top k: the public recipe beside our head.

The recipe, as in public training code: `lax.scan` over positions, the whole logits of one position
of each row, `lax.top_k`. It reads the embedding once per position.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from launch.bench.bytes_read import bytes_read
from launch.bench.models import VOCAB
from pipeline.compute.aot.compile import compile_for, v5e_devices
from pipeline.compute.aot.hlo import parse
from pipeline.compute.model.head import Head, TopK, score
from pipeline.compute.model.sharding import BATCH_AXES, make_mesh

WIDTH = 1152
"""gemma3-1b's."""
K = 128


def public_recipe(hidden: jax.Array, embedding: jax.Array) -> TopK:
    """Returns log-probs and ids of the `K` likeliest tokens per position of `rows seq embed`."""

    def one(_: None, x: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        logits = jnp.einsum("rd,vd->rv", x, embedding, preferred_element_type=jnp.float32)
        return None, jax.lax.top_k(jax.nn.log_softmax(logits), K)

    _, (logprobs, tokens) = jax.lax.scan(one, None, jnp.swapaxes(hidden, 0, 1))
    return TopK(jnp.swapaxes(logprobs, 0, 1), jnp.swapaxes(tokens, 0, 1))


def ours(hidden: jax.Array, embedding: jax.Array, *, head: Head) -> TopK:
    """Returns the same from our head."""
    found = score(
        hidden,
        jnp.zeros(hidden.shape[:2], jnp.int32),
        embedding,
        head=head,
        forbidden=jnp.zeros(VOCAB, bool),
        top_k=K,
    ).top
    assert found is not None
    return found


def _head(devices: Any) -> Head:
    return Head(softcap=None, temperature=1.0, tokens=2048, vocab=8192, mesh=make_mesh(devices))


def speed(*, rows: int, seq: int, repeats: int) -> dict[str, Any]:
    """Returns seconds of both in float32 on this machine, alternating, and their difference."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((rows, seq, WIDTH), np.float32))
    # Logits with a standard deviation of about 3, as in a trained model.
    embedding = jnp.asarray(rng.standard_normal((VOCAB, WIDTH), np.float32) * (3 / WIDTH**0.5))
    programs = {
        "theirs_s": jax.jit(public_recipe),
        "ours_s": jax.jit(partial(ours, head=_head(jax.devices()[:1]))),
    }
    compiled = {n: p.lower(hidden, embedding).compile() for n, p in programs.items()}
    first = {n: jax.block_until_ready(run(hidden, embedding)) for n, run in compiled.items()}
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(repeats):
        for name, run in compiled.items():
            began = time.perf_counter()
            jax.block_until_ready(run(hidden, embedding))
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "tokens": rows * seq,
        "apart": float(jnp.abs(first["ours_s"].logprobs - first["theirs_s"].logprobs).max()),
        "other_tokens": int((first["ours_s"].tokens != first["theirs_s"].tokens).sum()),
        **medians,
        "time_ratio": medians["theirs_s"] / medians["ours_s"],
    }


def embedding_reads(*, rows: int, seq: int) -> dict[str, Any]:
    """Returns bytes of the embedding read per position, in both programs for a v5e chip."""
    devices = v5e_devices(1)
    head = _head(devices)

    def array(shape: tuple[int, ...], *axes: Any) -> Any:
        place = NamedSharding(head.mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

    given = (array((rows, seq, WIDTH), BATCH_AXES), array((VOCAB, WIDTH)))
    found = {}
    for name, function in (("theirs", public_recipe), ("ours", partial(ours, head=head))):
        module = parse(compile_for(jax.jit(function).trace(*given)).text)
        found[f"{name}_mb"] = bytes_read(module, (VOCAB, WIDTH)) / (rows * seq) / 1e6
    return {"tokens": rows * seq, **found, "ratio": found["theirs_mb"] / found["ours_mb"]}
