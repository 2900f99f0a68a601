"""What a sampler multiplies with: base and adapter as they are, or a copy of its own.

A copy has matrices only; embedding and norms are always the base's own arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax

from configs.schema import Config, Lora
from pipeline.compute.model import lora as lora_lib
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import build


def rollout_policy(policy: Policy, config: Config) -> Policy:
    """The model that the engine runs by `plan.rollout_weights`; allocates nothing."""
    if config.plan.rollout_weights == "merged":
        return policy.without_adapter()
    return policy.quantized(config.sampler_quantization)


class RolloutWeights:
    """Base and adapter in the form that the engine runs, by `plan.rollout_weights`.

    What is quantized is quantized when this is made; merging is compiled then.

    Args:
        policy: the model that adapters are for.
        base: its frozen parameters; never changed. A sampler of its own has had them quantized
            while they were loaded, and there is nothing left to do.
        config: says what is wanted.

    Attributes:
        policy: the model that the engine runs.
        base: its frozen parameters; where they are merged, with the adapter last loaded.
        adapter: what is added to them while they are multiplied; empty where they are merged.
    """

    def __init__(self, policy: Policy, base: Params, config: Config) -> None:
        self._plain = base
        self._merge: Mapping[str, jax.stages.Compiled] = {}
        self.policy, self.base = rollout_policy(policy, config), dict(base)
        self.adapter: Params = {}
        if config.plan.rollout_weights == "merged":
            self._merge = _compile_merge(policy)
        elif self.policy is not policy:
            self.base = self.policy.as_kept(policy.parameters(base))

    def load(self, adapter: Params) -> None:
        """Takes over an adapter that is on the devices; compiles nothing.

        Each matrix of the former copy is freed before that of the new one is made, from the base:
        there are never two copies, and no rounding adds up.
        """
        if not self._merge:
            self.adapter = adapter
            return
        for name, merge in self._merge.items():
            if self.base[name] is not self._plain[name]:
                self.base[name].delete()
            pair = adapter[f"{name}_lora_a"], adapter[f"{name}_lora_b"]
            self.base[name] = jax.block_until_ready(merge(self._plain[name], *pair))


def _compile_merge(policy: Policy) -> dict[str, jax.stages.Compiled]:
    """For each adapted matrix the program that merges it; layers that are alike share one."""
    base, adapter = policy.abstract_params()
    compiled: dict[tuple[object, ...], jax.stages.Compiled] = {}
    found = {}
    for name, matrix in base.items():
        if f"{name}_lora_a" not in adapter:
            continue
        arrays = (matrix, adapter[f"{name}_lora_a"], adapter[f"{name}_lora_b"])
        kind = (*name.split(".")[-2:], *(array.shape for array in arrays))
        if kind not in compiled:
            program = jax.jit(partial(_merge, name, policy.lora), out_shardings=matrix.sharding)
            compiled[kind] = build(program.trace(*arrays), policy.mesh)
        found[name] = compiled[kind]
    return found


def _merge(name: str, lora: Lora, matrix: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    pair = {f"{name}_lora_a": a, f"{name}_lora_b": b}
    return lora_lib.merge(name, matrix, pair, lora=lora).astype(matrix.dtype)
