"""Opens the policy of a model folder, with room for the adapter of `lora.start`."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from configs.schema import Lora
from pipeline.compute.model import weights
from pipeline.compute.model.adapter_source import needs_separate
from pipeline.compute.model.policy import Params, Policy


def make_policy(
    folder: Path, *, dtype: str, lora: Lora, mesh: Mesh, quantization: str = "none"
) -> Policy:
    """The policy of a folder, with room for the adapter of `lora.start`; reads no weights.

    Raises:
        FileNotFoundError: naming the file that is absent.
        ValueError: what in the folder cannot be used, and why.
    """
    return Policy.create(
        weights.read_architecture(folder, dtype=jnp.dtype(dtype)),
        lora=lora,
        mesh=mesh,
        quantization=quantization,
        separate=needs_separate(lora),
    )


def open_policy(
    folder: Path, *, dtype: str, lora: Lora, mesh: Mesh, quantization: str = "none"
) -> tuple[Policy, Params]:
    """Policy and base from a folder; see `make_policy`.

    Raises:
        FileNotFoundError: naming the file that is absent.
        ValueError: what in the folder cannot be used, and why.
    """
    policy = make_policy(folder, dtype=dtype, lora=lora, mesh=mesh, quantization=quantization)
    return policy, policy.load_base(folder)
