"""The peer: Tunix 0.1.7's own GRPO loss on its own Gemma 3, with qwix LoRA, as in its recipes.

Two of its defects are fixed, and rows that use a fix say so:

* it skips its activation constraints if the first local device is a CPU, which is the case when
  compiling for another machine; here they follow the mesh (without them its fsdp programs would be
  compiled with a different layout);
* its remat (`nnx.remat` inside the layers) raises `TraceContextError` with its flax version;
  "repaired" is `jax.checkpoint` around each layer as a pure function of its state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tunix.models.gemma3 import model as gemma3
from tunix.rl import algo_core
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
from tunix.utils import sharding_utils

TARGETS = r".*layers.*(q_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)"
"""Modules with LoRA, the same as with our `lora.targets = "all"`."""

PAD, EOS = 0, 1

FSDP, TP = "fsdp", "tp"
"""Mesh axes of Tunix."""


@dataclass(frozen=True)
class Peer:
    """Tunix's LoRA-wrapped Gemma 3 without its arrays.

    Attributes:
        graphdef: the model's structure.
        lora: its LoRA parameters, in the base's dtype as in Tunix's recipes.
        base: all other parameters.
        remat: whether the repaired remat is used.
        temperature: of the loss.
        beta: weight of its KL term; 0: no KL term and no reference.
        mesh: devices; None: the default one.
    """

    graphdef: Any
    lora: Any
    base: Any
    remat: bool
    temperature: float
    beta: float
    mesh: Mesh | None

    @staticmethod
    def create(
        config: gemma3.ModelConfig,
        *,
        rank: int,
        alpha: float,
        remat: bool = False,
        temperature: float = 1.0,
        beta: float = 0.0,
        mesh: Mesh | None = None,
    ) -> Peer:
        """Describes the model; allocates nothing."""
        provider = qwix.LoraProvider(module_path=TARGETS, rank=rank, alpha=alpha)
        bare = nnx.eval_shape(lambda: gemma3.Gemma3(config, rngs=nnx.Rngs(0)))
        model = nnx.eval_shape(
            lambda bare: qwix.apply_lora_to_model(
                bare, provider, rngs=nnx.Rngs(0), **bare.get_model_input()
            ),
            bare,
        )
        graphdef, lora, base = nnx.split(model, nnx.LoRAParam, ...)
        return Peer(graphdef, lora, base, remat, temperature, beta, mesh)

    def with_values(self, values: Mapping[str, jax.Array]) -> tuple[Any, Any]:
        """Returns LoRA and base with values by path, each in its own dtype."""

        def filled(state: Any) -> Any:
            flat = nnx.to_flat_state(state)
            return nnx.from_flat_state(
                [
                    (path, leaf.replace(values[".".join(map(str, path))].astype(leaf.dtype)))
                    for path, leaf in flat
                ]
            )

        return filled(self.lora), filled(self.base)

    def gradient(
        self, lora: Any, base: Any, example: TrainExample
    ) -> tuple[tuple[jax.Array, dict[str, Any]], Any]:
        """Returns value, metrics and LoRA gradient of its GRPO loss, as in its trainer."""
        config = GRPOConfig(beta=self.beta, loss_agg_mode="token-mean")
        config.temperature = self.temperature  # as its GRPOLearner does

        def loss(model: Any, example: TrainExample) -> tuple[jax.Array, dict[str, Any]]:
            return algo_core.grpo_loss_fn(model, example, config, PAD, EOS)

        take = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam), has_aux=True)
        with _constraints(self.mesh), _repaired_remat() if self.remat else contextlib.nullcontext():
            return take(nnx.merge(self.graphdef, lora, base), example)

    def placed(self) -> tuple[Any, Any]:
        """Returns LoRA and base as shapes with Tunix's own shardings on its mesh."""
        mesh = self.mesh
        assert mesh is not None

        def place(state: Any) -> Any:
            specs = nnx.get_partition_spec(state)
            return jax.tree.map(
                lambda leaf, spec: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
                ),
                state,
                specs,
            )

        return place(self.lora), place(self.base)


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Returns Tunix's mesh of (fsdp, tp) with all devices on fsdp."""
    return Mesh(np.asarray(devices)[:, None], (FSDP, TP), axis_types=(AxisType.Auto,) * 2)


def abstract_example(
    rows: int, *, prompt: int, completion: int, mesh: Mesh, reference: bool
) -> TrainExample:
    """Returns a batch of `rows` rollouts as shapes, sharded over the mesh as in Tunix's trainer."""
    place = NamedSharding(mesh, PartitionSpec(FSDP))

    def array(*shape: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=place)

    return TrainExample(
        prompt_ids=array(prompt, dtype=jnp.int32),
        prompt_mask=array(prompt, dtype=jnp.bool),
        completion_ids=array(completion, dtype=jnp.int32),
        completion_mask=array(completion, dtype=jnp.bool),
        advantages=array(dtype=jnp.float32),
        ref_per_token_logps=array(completion, dtype=jnp.float32) if reference else None,
        old_per_token_logps=None,
    )


@contextlib.contextmanager
def _constraints(mesh: Mesh | None) -> Iterator[None]:
    def shard(x: jax.Array, axes: tuple[str | None, ...], **_: Any) -> jax.Array:
        assert mesh is not None
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    if mesh is None:
        yield
        return
    with mock.patch.object(sharding_utils, "shard", shard):
        yield


@contextlib.contextmanager
def _repaired_remat() -> Iterator[None]:
    def call(self: Any, x: Any, positions: Any, cache: Any, mask: Any) -> Any:
        graphdef, state = nnx.split(self)

        def pure(state: Any, x: Any, positions: Any, mask: Any) -> Any:
            return nnx.merge(graphdef, state).block(x, positions, cache, mask)

        return jax.checkpoint(pure)(state, x, positions, mask)

    with mock.patch.object(gemma3.DecoderLayer, "__call__", call):
        yield
