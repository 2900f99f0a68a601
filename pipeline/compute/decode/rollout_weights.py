"""The sampler's weights: base and adapter as they are, or a merged or quantized copy.

A copy holds matrices only; embedding and norms are always the base's own arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax

from configs.schema import Config, Lora
from pipeline.compute.model import lora as lora_lib
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import lowered


def rollout_policy(policy: Policy, config: Config) -> Policy:
    """The model that the engine runs by `plan.rollout_weights`; allocates nothing."""
    if config.plan.rollout_weights == "merged":
        return policy.without_adapter()
    return policy.quantized(config.sampler_quantization)


class RolloutWeights:
    """Base and adapter in the form that the engine runs, by `plan.rollout_weights`.

    Construction quantizes the base, or compiles the merge.

    Args:
        policy: the model that adapters are for.
        base: its frozen parameters; never changed. A dedicated sampler quantizes them while it
            loads them, and they are used as they are.
        config: with `plan.rollout_weights`.

    Attributes:
        policy: the model that the engine runs.
        base: its frozen parameters; if merged, with the adapter that was loaded last.
        adapter: LoRA parameters; empty if merged.
    """

    def __init__(self, policy: Policy, base: Params, config: Config) -> None:
        self._unmerged = base
        self._merge: Mapping[str, jax.stages.Compiled] = {}
        self.policy, self.base = rollout_policy(policy, config), dict(base)
        self.adapter: Params = {}
        if config.plan.rollout_weights == "merged":
            self._merge = _compile_merge(policy)
        elif self.policy is not policy:
            self.base = self.policy.stored_base(base.items())

    def load(self, adapter: Params) -> None:
        """Loads an adapter that is on the devices; compiles nothing.

        Each matrix of the previous copy is freed before the new one is made from the base: two
        copies never exist, and rounding errors do not accumulate.
        """
        if not self._merge:
            self.adapter = adapter
            return
        for name, merge in self._merge.items():
            if self.base[name] is not self._unmerged[name]:
                self.base[name].delete()
            pair = adapter[f"{name}_lora_a"], adapter[f"{name}_lora_b"]
            self.base[name] = jax.block_until_ready(merge(self._unmerged[name], *pair))


def _compile_merge(policy: Policy) -> dict[str, jax.stages.Compiled]:
    """The program that merges each adapted matrix; layers of the same shape share one."""
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
            compiled[kind] = lowered(program.trace(*arrays), policy.mesh).compile()
        found[name] = compiled[kind]
    return found


def _merge(name: str, lora: Lora, matrix: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    pair = {f"{name}_lora_a": a, f"{name}_lora_b": b}
    return lora_lib.merge(name, matrix, pair, lora=lora).astype(matrix.dtype)
