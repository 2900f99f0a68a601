"""The adapter: which matrices carry LoRA, how it starts, how it is named, hashed and merged.

LoRA (arXiv:2106.09685) is attached by qwix. An adapter is a flat dict from parameter path to
float32 array; that is what is trained, hashed, shipped and saved. Fresh, it is the identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx

from configs.schema import Lora
from pipeline.model.gemma import Gemma

Adapter = dict[str, jax.Array]

_TARGETS = {
    "attention": r"layers/\d+/attn/\w+",
    "mlp": r"layers/\d+/mlp/\w+",
    "all": r"layers/\d+/(attn|mlp)/\w+",
}

# How lora_a and lora_b multiply to the shape of the matrix they adapt.
_MERGE = {
    "q_einsum.w": "dr,rnh->ndh",
    "kv_einsum.w": "dr,rckh->ckdh",
    "qkv_einsum.w": "dr,rcnh->cndh",
    "attn_vec_einsum.w": "nhr,rd->nhd",
    "gate_proj.kernel": "dr,rf->df",
    "up_proj.kernel": "dr,rf->df",
    "down_proj.kernel": "fr,rd->fd",
}


def attach(model: Gemma, lora: Lora) -> Gemma:
    """The model with qwix LoRA on the target matrices; call it under `nnx.eval_shape`."""
    provider = qwix.LoraProvider(
        module_path=_TARGETS[lora.targets], rank=lora.rank, alpha=lora.alpha
    )
    tokens = jnp.zeros((1, 1), jnp.int32)
    return qwix.apply_lora_to_model(model, provider, tokens, tokens, rngs=nnx.Rngs(0))


def fresh(shapes: Mapping[str, jax.ShapeDtypeStruct], *, seed: int) -> Adapter:
    """A new adapter: A is He-uniform, B is zero, so that it changes nothing yet."""
    return _draw(shapes, seed=seed, lora_b=0.0)


def probe(shapes: Mapping[str, jax.ShapeDtypeStruct], *, seed: int) -> Adapter:
    """A random adapter that changes every output; only for comparing sampler and learner."""
    return _draw(shapes, seed=seed, lora_b=0.02)


def _draw(shapes: Mapping[str, jax.ShapeDtypeStruct], *, seed: int, lora_b: float) -> Adapter:
    he_uniform = jax.nn.initializers.he_uniform()
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    adapter = {}
    for key, (name, shape) in zip(keys, sorted(shapes.items()), strict=True):
        if name.endswith("_lora_a"):
            adapter[name] = he_uniform(key, shape.shape, jnp.float32)
        else:
            adapter[name] = lora_b * jax.random.normal(key, shape.shape, jnp.float32)
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
    """What the adapter adds to the base parameter `name`, float32; None if it is not adapted."""
    if f"{name}_lora_a" not in adapter:
        return None
    equation = _MERGE[".".join(name.split(".")[-2:])]
    a, b = adapter[f"{name}_lora_a"], adapter[f"{name}_lora_b"]
    return jnp.einsum(equation, a, b, precision="highest") * (lora.alpha / lora.rank)
