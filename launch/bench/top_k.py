"""The exact top k of a frozen teacher: our head beside the public recipe.

The recipe, as in public training code: `lax.scan` over positions, the whole logits of one position
of each row, `lax.top_k`. It reads the embedding once per position.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from launch.bench.bytes_read import bytes_read
from launch.bench.harness import Bound, Row, Section, medians
from pipeline.compute.aot.compile import compile_for, v5e_devices
from pipeline.compute.aot.hlo import parse
from pipeline.compute.model.head import Head
from pipeline.compute.model.head_score import score
from pipeline.compute.model.sharding import BATCH_AXES, make_mesh
from pipeline.compute.model.top_k import TopK
from pipeline.plan.topology import TPU_COMPILER

VOCAB, WIDTH = 262_144, 1152
"""Of gemma3-1b."""
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
        forbidden=jnp.zeros(embedding.shape[0], bool),
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

    def run(name: str) -> TopK:
        found: TopK = jax.block_until_ready(compiled[name](hidden, embedding))
        return found

    mine, other = run("ours_s"), run("theirs_s")
    seconds = medians({name: partial(run, name) for name in compiled}, repeats=repeats)
    return {
        "apart": float(jnp.abs(mine.logprobs - other.logprobs).max()),
        "other_tokens": int((mine.tokens != other.tokens).sum()),
        **seconds,
        "time_ratio": seconds["theirs_s"] / seconds["ours_s"],
    }


def embedding_reads(*, rows: int, seq: int) -> dict[str, Any]:
    """Returns bytes of the embedding read per position, in both programs for a v5e chip."""
    head = _head(v5e_devices(1))

    def array(shape: tuple[int, ...], *axes: Any) -> Any:
        place = NamedSharding(head.mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

    given = (array((rows, seq, WIDTH), BATCH_AXES), array((VOCAB, WIDTH)))
    found = {}
    for name, function in (("theirs", public_recipe), ("ours", partial(ours, head=head))):
        module = parse(compile_for(jax.jit(function).trace(*given)).text)
        found[f"{name}_mb"] = bytes_read(module, VOCAB * WIDTH) / (rows * seq) / 1e6
    return {**found, "ratio": found["theirs_mb"] / found["ours_mb"]}


SPEED = Section(
    "top_k",
    "The exact top 128, width 1152, against the public recipe (whole logits of one position of "
    "each row in a scan, lax.top_k); float32, medians of runs in turns",
    [Row(f"8 rows x {seq}", speed, {"rows": 8, "seq": seq, "repeats": 3}) for seq in (16, 64)],
    (Bound("time_ratio", least=2), Bound("apart", most=1e-4), Bound("other_tokens", most=0)),
)
READS = Section(
    "reads",
    "Embedding that a position reads in both programs, compiled for a v5e chip, bfloat16",
    (Row("8 rows x 512", embedding_reads, {"rows": 8, "seq": 512}),),
    (Bound("ratio", least=100),),
    TPU_COMPILER,
)
