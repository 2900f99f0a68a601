"""The adapter: target matrices, initialisation, hash and merge.

qwix attaches LoRA (arXiv:2106.09685). An adapter is a flat dict from parameter path to float32
array; this form is trained, hashed, sent and saved. A fresh adapter is the identity.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from tunix.models.gemma3 import model as gemma3

from configs.schema import Lora
from pipeline.compute.model import quantize
from pipeline.compute.model.gemma import Gemma
from pipeline.compute.model.sharding import batch_shards, platform
from pipeline.compute.model.tensors import PROJECTIONS
from pipeline.data.models.model_shape import select_targets

Adapter = dict[str, jax.Array]

# Product of lora_a and lora_b in the shape of the adapted matrix.
_MERGE = {
    "q_einsum.w": "dr,rnh->ndh",
    "kv_einsum.w": "dr,rckh->ckdh",
    "qkv_einsum.w": "dr,rcnh->cndh",
    "attn_vec_einsum.w": "nhr,rd->nhd",
    "gate_proj.kernel": "dr,rf->df",
    "up_proj.kernel": "dr,rf->df",
    "down_proj.kernel": "fr,rd->fd",
    "input_gate.kernel": "dr,rp->dp",
    "projection.kernel": "pr,rd->pd",
}
_THIRDS = ("early", "middle", "late")
_MODULES = {"attn": "attention", "mlp": "mlp", "per_layer": "per_layer"}


def attach(
    model: Gemma, lora: Lora, *, quantization: str = "none", separate: bool = False
) -> Gemma:
    """The model with qwix LoRA on the target matrices; call it under `nnx.eval_shape`.

    The model must be an argument of the traced function: qwix 0.1.8 identifies a matrix by the
    operations that produce it, and misses a quantized one that is produced in the same trace.

    Args:
        model: without an adapter.
        lora: rank, scale and targets.
        quantization: of the matrices of all layers, adapted or not.
        separate: give a fused matrix the sum of the ranks of its projections, so that each of them
            can have a separate lora_a.

    Raises:
        ValueError: if `lora.targets` matches no matrix.
    """
    modules = {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if path[:1] == ("layers",) and isinstance(module, gemma3.Einsum | nnx.Linear)
    }
    adapted = set(select_targets(modules, lora.targets))
    rules: dict[qwix.QuantizationRule, list[str]] = {}
    for path, module in modules.items():
        how = quantize.rule(module, path.split("/")[-1], quantization=quantization)
        if path in adapted:
            matrix = ".".join(path.split("/")[2:])
            rank = lora.rank * (len(PROJECTIONS[matrix]) if separate else 1)
            # qwix multiplies by alpha / rank.
            rule = qwix.LoraRule(rank=rank, alpha=lora.scale * rank, **how)
        elif how:
            rule = qwix.QuantizationRule(**how)
        else:
            continue
        rules.setdefault(rule, []).append(path)
    provider = quantize.Provider(
        [_at(rule, paths) for rule, paths in rules.items()],
        quantization=quantization,
        flat=platform(model.mesh) == "cpu",
    )
    # One row per batch shard.
    tokens = jnp.zeros((batch_shards(model.mesh), 1), jnp.int32)
    model.attaching = True
    wrapped: Gemma = qwix.apply_lora_to_model(model, provider, tokens, tokens, rngs=nnx.Rngs(0))
    model.attaching = wrapped.attaching = False
    found = {
        "/".join(map(str, path))
        for path, module in nnx.iter_modules(wrapped)
        if any(isinstance(value, nnx.LoRAParam) for value in vars(module).values())
    }
    assert found == adapted, found ^ adapted  # qwix skips modules that it does not recognise
    return wrapped


def _at(rule: qwix.QuantizationRule, paths: Sequence[str]) -> qwix.QuantizationRule:
    return replace(rule, module_path="|".join(map(re.escape, paths)))


# PEFT draws A by `kaiming_uniform_(a=sqrt(5))`: uniform within 1 / sqrt(inputs).
_PEFT_A = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
_ZEROS = jax.nn.initializers.zeros


def fresh(shapes: Mapping[str, jax.ShapeDtypeStruct], *, seed: int) -> Adapter:
    """A new adapter with PEFT's initialisation: A uniform in +-1 / sqrt(inputs), B zero.

    B = 0 makes it the identity. A's scale multiplies every update of B: the same learning rate acts
    as in PEFT.
    """
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: (_PEFT_A if name.endswith("_lora_a") else _ZEROS)(key, shape.shape, jnp.float32)
        for key, (name, shape) in zip(keys, sorted(shapes.items()), strict=True)
    }


def probe(shapes: Mapping[str, jax.ShapeDtypeStruct], *, seed: int) -> dict[str, np.ndarray]:
    """A random adapter that changes every output; only for comparing sampler and learner.

    A is uniform in +-sqrt(6 / inputs), B normal with a standard deviation of 0.02. NumPy draws
    them: XLA would compile a program for each shape.
    """
    random = np.random.default_rng(seed)
    adapter = {}
    for name, shape in sorted(shapes.items()):
        if name.endswith("_lora_a"):
            bound = np.sqrt(6 * shape.shape[-1] / shape.size)
            values = random.uniform(-bound, bound, shape.shape)
        else:
            values = random.normal(scale=0.02, size=shape.shape)
        adapter[name] = values.astype(np.float32)
    return adapter


def sha256(adapter: Mapping[str, np.ndarray | jax.Array]) -> str:
    """Hash over names, shapes and float32 values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(adapter):
        value = np.ascontiguousarray(np.asarray(adapter[name], dtype="<f4"))
        digest.update(f"{name}{value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def delta(name: str, adapter: Mapping[str, jax.Array], *, lora: Lora) -> jax.Array | None:
    """The adapter's change of base parameter `name`, float32; None if it is not adapted."""
    if f"{name}_lora_a" not in adapter:
        return None
    equation = _MERGE[".".join(name.split(".")[-2:])]
    a, b = adapter[f"{name}_lora_a"], adapter[f"{name}_lora_b"]
    return jnp.einsum(equation, a, b, precision="highest") * lora.scale


def norms(adapter: Mapping[str, jax.Array], *, lora: Lora, layers: int) -> dict[str, jax.Array]:
    """Frobenius norm of the adapter's change of the base, float32, in total and by group.

    The change of a matrix is `delta`, scale x A B with A `in rank` and B `rank out`. Its squared
    norm is scale^2 x sum over i, j of (A^T A)_ij (B B^T)_ij, which needs no array of the matrix's
    size. A fresh adapter has norm 0.

    Args:
        adapter: pairs of A and B.
        lora: its scale.
        layers: of the model.

    Returns:
        `adapter_norm`, and `adapter_norm/GROUP` for the adapted groups: `early`, `middle`, `late`
        (the third of the layers, number 3 i // layers of layer i), `_attention`, `_mlp` or
        `_per_layer`.
    """
    squares: dict[str, list[jax.Array]] = {"adapter_norm": []}
    for name in sorted(adapter):
        if not name.endswith("_lora_a"):
            continue
        b = adapter[f"{name.removesuffix('a')}b"]
        a, b = adapter[name].reshape(-1, len(b)), b.reshape(len(b), -1)
        square = jnp.sum(
            jnp.matmul(a.T, a, precision="highest") * jnp.matmul(b, b.T, precision="highest")
        )
        _, layer, module, *_ = name.split(".")
        group = f"adapter_norm/{_THIRDS[3 * int(layer) // layers]}_{_MODULES[module]}"
        for key in ("adapter_norm", group):
            squares.setdefault(key, []).append(square)
    # Rounding may make a sum near 0 negative.
    return {
        name: lora.scale * jnp.sqrt(jnp.maximum(jnp.sum(jnp.stack(values)), 0.0))
        for name, values in squares.items()
    }


def merge(name: str, value: Any, adapter: Mapping[str, jax.Array], *, lora: Lora) -> Any:
    """Base parameter `name` plus `delta`, float32; `value`, of any kind, if it is not adapted."""
    change = delta(name, adapter, lora=lora)
    return value if change is None else value.astype(jnp.float32) + change
