"""The policy: one frozen base on the devices, and the ways to run it under an adapter.

Sampler and learner of one process share one `Policy`. Its methods are pure and meant to be traced:
base and adapter are arguments, so compiled programs hold no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from configs.schema import Lora
from pipeline.compute.model import lora as lora_lib
from pipeline.compute.model import quantize, weights
from pipeline.compute.model.gemma import Architecture, Gemma
from pipeline.compute.model.sharding import by_row, placed, replicated

Params = dict[str, Any]
"""Arrays by parameter path; shapes in their place when a program is only compiled."""

_EMBEDDING = "embedder.input_embedding"


@dataclass(frozen=True)
class Policy:
    """A LoRA-wrapped Gemma without its arrays.

    Attributes:
        architecture: shape of the model.
        lora: shape of the adapter.
        mesh: devices it runs on.
        base_shapes: shape and type of each base parameter, by path, as it is kept.
        adapter_shapes: shape of each adapter parameter, by path; none without an adapter.
        plain_shapes: shape and type of each base parameter as it is before quantization.
        separate: whether projections that share a matrix have a lora_a each.
        quantization: how the layers' matrices are kept and multiplied.
    """

    architecture: Architecture
    lora: Lora
    mesh: Mesh
    base_shapes: Mapping[str, jax.ShapeDtypeStruct]
    adapter_shapes: Mapping[str, jax.ShapeDtypeStruct]
    plain_shapes: Mapping[str, jax.ShapeDtypeStruct]
    separate: bool
    quantization: str
    _recipes: Mapping[str, quantize.Recipe]
    _graphdef: nnx.GraphDef[Gemma]
    _abstract: nnx.State

    @staticmethod
    def create(
        architecture: Architecture,
        *,
        lora: Lora,
        mesh: Mesh,
        quantization: str = "none",
        separate: bool = False,
        adapted: bool = True,
    ) -> Policy:
        """Describes the model; allocates nothing.

        Args:
            architecture: shape of the model.
            lora: shape of the adapter.
            mesh: devices it will run on.
            quantization: how the layers' matrices are kept and multiplied.
            separate: see `pipeline.compute.model.lora.attach`.
            adapted: whether there is an adapter; else the base must be unquantized, and `bind`
                takes an empty one.

        Raises:
            ValueError: if `lora.targets` matches no matrix, or the mesh does not divide the
                vocabulary.
        """
        assert adapted or quantization == "none", quantization
        bare = nnx.eval_shape(lambda: architecture.build(nnx.Rngs(0), activations=by_row(mesh)))
        plain = {
            _name(path): jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            for path, variable in nnx.to_flat_state(nnx.state(bare))
        }
        placed(plain, mesh)  # refuses a vocabulary that the mesh does not divide
        model = bare
        if adapted:
            attach = partial(
                lora_lib.attach, lora=lora, quantization=quantization, separate=separate
            )
            model = nnx.eval_shape(attach, bare)
        graphdef, abstract = nnx.split(model)
        base, adapter = {}, {}
        for path, variable in nnx.to_flat_state(abstract):
            shape = jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            if isinstance(variable, nnx.LoRAParam):
                adapter[_name(path)] = jax.ShapeDtypeStruct(variable.shape, jnp.float32)
            else:
                base[_name(path)] = quantize.kept_shape(shape)
        recipes = quantize.recipes(model)
        return Policy(
            architecture,
            lora,
            mesh,
            base,
            adapter,
            plain,
            separate,
            quantization,
            recipes,
            graphdef,
            abstract,
        )

    def bind(self, base: Params, adapter: Params, *, exact: bool = False) -> Gemma:
        """The model under `adapter`. Meant to be traced.

        Args:
            base: frozen parameters as they are kept.
            adapter: float32 parameters.
            exact: leave the adapter in float32, for the layers to cast (see `Gemma.__call__` with
                `remat`); else it is cast to the base's type here.
        """
        values = {**base, **adapter}
        flat = []
        for path, variable in nnx.to_flat_state(self._abstract):
            value = quantize.unpack(values[_name(path)], variable.dtype)
            if not (exact and isinstance(variable, nnx.LoRAParam)):
                value = value.astype(variable.dtype)
            flat.append((path, variable.replace(value)))
        return nnx.merge(self._graphdef, nnx.from_flat_state(flat))

    @staticmethod
    def embedding(base: Params) -> jax.Array:
        """The tied embedding, `vocab embed`."""
        return base[_EMBEDDING]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.architecture.config.num_embed

    def abstract_params(self) -> tuple[Params, Params]:
        """Base and adapter as shapes with shardings, for compiling ahead of time."""
        whole = replicated(self.mesh)
        adapter = {
            name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=whole)
            for name, shape in self.adapter_shapes.items()
        }
        return placed(self.base_shapes, self.mesh), adapter

    def load_base(self, folder: Path) -> Params:
        """The frozen base from a folder, each device with its part of every parameter.

        What is to be quantized is quantized on the devices, parameter by parameter.

        Raises:
            ValueError: naming every tensor that is missing, surplus or of another shape.
        """
        return self.as_kept(weights.stream(folder, placed(self.plain_shapes, self.mesh)))

    def as_kept(self, parameters: Iterable[tuple[str, jax.Array]]) -> Params:
        """The base made of plain parameters, of which those that change may be freed one by one."""
        base: Params = {}
        shapes, _ = self.abstract_params()
        for name, value in parameters:
            recipe = self._recipes.get(name)
            if recipe is None:
                base[name] = value
            else:
                base |= quantize.entries(name, value, recipe, shapes=shapes)
        return base

    def parameters(self, base: Params) -> Iterator[tuple[str, jax.Array]]:
        """The base's parameters one by one, as plain arrays: quantized ones are computed back."""
        for name in self.plain_shapes:
            yield name, quantize.parameter(name, base, self._recipes)

    @property
    def is_quantized(self) -> bool:
        """Whether the base is kept in another form than it is computed with."""
        return bool(self._recipes)

    def quantized(self, quantization: str) -> Policy:
        """The same model and adapter on a base that is kept and multiplied so."""
        if quantization == self.quantization:
            return self
        return Policy.create(
            self.architecture,
            lora=self.lora,
            mesh=self.mesh,
            quantization=quantization,
            separate=self.separate,
        )

    def plain(self) -> Policy:
        """The same model with an unquantized base."""
        return self.quantized("none")

    def unrounded(self) -> Policy:
        """The same model and base without rounded activations, as an export is computed."""
        return self.quantized("int8_outputs") if self.quantization == "int8_matmul" else self

    def without_adapter(self) -> Policy:
        """The same model on an unquantized base, with no adapter: it is in the base, or none."""
        return Policy.create(self.architecture, lora=self.lora, mesh=self.mesh, adapted=False)

    def place_adapter(self, adapter: Mapping[str, jax.typing.ArrayLike]) -> Params:
        """An adapter on the mesh, replicated, float32.

        Raises:
            ValueError: if names or shapes are not this policy's.
        """
        given = {name: jnp.shape(value) for name, value in adapter.items()}
        wanted = {name: shape.shape for name, shape in self.adapter_shapes.items()}
        if given != wanted:
            odd = sorted(
                name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name)
            )
            raise ValueError(
                f"this adapter does not fit the model: {len(odd)} entries differ, the first is "
                f"{odd[0]}: {given.get(odd[0], 'absent')}, wanted {wanted.get(odd[0], 'absent')}"
            )
        place = replicated(self.mesh)
        return {
            name: jax.device_put(jnp.asarray(value, jnp.float32), place)
            for name, value in sorted(adapter.items())
        }

    def fresh_adapter(self, seed: int) -> Params:
        """An adapter that changes nothing yet."""
        return self.place_adapter(lora_lib.fresh(self.adapter_shapes, seed=seed))

    def probe_adapter(self, seed: int) -> Params:
        """A random adapter that changes every output."""
        return self.place_adapter(lora_lib.probe(self.adapter_shapes, seed=seed))

    def no_adapter(self) -> Params:
        """All zeros: the base itself, the KL's reference."""
        return self.place_adapter(
            {name: jnp.zeros(shape.shape) for name, shape in self.adapter_shapes.items()}
        )


def _name(path: tuple[object, ...]) -> str:
    return ".".join(str(part) for part in path)
