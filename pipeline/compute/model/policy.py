"""The policy: a LoRA-wrapped Gemma, without its parameters.

Sampler and learner of one process share one `Policy`. Its methods are pure and can be traced: base
and adapter are arguments, so compiled programs hold no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from configs.schema import Lora
from pipeline.compute.model import lora as lora_lib
from pipeline.compute.model import quantize, weights
from pipeline.compute.model.architecture import Architecture
from pipeline.compute.model.gemma import Gemma
from pipeline.compute.model.layer import norm_factor
from pipeline.compute.model.lookup import tiled, untiled
from pipeline.compute.model.sharding import HOST_MEMORY, in_host, placed, replicated

Params = dict[str, Any]
"""Arrays by parameter path; shapes for ahead-of-time compilation."""

_EMBEDDING = "embedder.input_embedding"
_PER_LAYER = "per_layer_embedder.embedding"


@dataclass(frozen=True, eq=False)
class Policy:
    """A LoRA-wrapped Gemma without its arrays; its construction allocates nothing.

    Attributes:
        architecture: of the model.
        lora: settings of the adapter.
        mesh: devices.
        quantization: of the layers' matrices.
        separate: whether projections that share a matrix have separate lora_a; see `lora.attach`.
        adapted: whether there is an adapter; if not, the base must be unquantized, and `bind` takes
            an empty adapter.
        embeddings_in_host: whether the per-layer embeddings are in host memory, with the rows of
            `lookup.tiled`.
        plain_shapes: shape and dtype of each base parameter as models are published, by path.
        base_shapes: shape and dtype of each stored base parameter, by path.
        adapter_shapes: shape of each adapter parameter, by path; empty without an adapter.

    Raises:
        ValueError: if `lora.targets` matches no matrix, the mesh does not divide the vocabulary, or
            there are no embeddings for host memory.
    """

    architecture: Architecture
    _: KW_ONLY
    lora: Lora
    mesh: Mesh
    quantization: str = "none"
    separate: bool = False
    adapted: bool = True
    embeddings_in_host: bool = False
    plain_shapes: Mapping[str, jax.ShapeDtypeStruct] = field(init=False, repr=False)
    base_shapes: Mapping[str, jax.ShapeDtypeStruct] = field(init=False, repr=False)
    adapter_shapes: Mapping[str, jax.ShapeDtypeStruct] = field(init=False, repr=False)
    _recipes: Mapping[str, quantize.Recipe] = field(init=False, repr=False)
    _graphdef: nnx.GraphDef[Gemma] = field(init=False, repr=False)
    _abstract: nnx.State = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.adapted or self.quantization == "none", self.quantization
        bare = model = nnx.eval_shape(
            lambda: Gemma(self.architecture, mesh=self.mesh, rngs=nnx.Rngs(0))
        )
        plain = {
            _name(path): jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            for path, variable in nnx.to_flat_state(nnx.state(bare))
        }
        placed(plain, self.mesh)  # raises if the mesh does not divide the vocabulary
        if self.adapted:
            attach = partial(
                lora_lib.attach,
                lora=self.lora,
                quantization=self.quantization,
                separate=self.separate,
            )
            model = nnx.eval_shape(attach, bare)
        graphdef, abstract = nnx.split(model)
        base, adapter = {}, {}
        for path, variable in nnx.to_flat_state(abstract):
            shape = jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            if isinstance(variable, nnx.LoRAParam):
                adapter[_name(path)] = jax.ShapeDtypeStruct(variable.shape, jnp.float32)
            else:
                base[_name(path)] = quantize.packed_shape(shape)
        if self.embeddings_in_host:
            self.architecture.shape.check_embeddings("host")
            row, kept = self.architecture.shape.host_row, base[_PER_LAYER]
            base[_PER_LAYER] = jax.ShapeDtypeStruct((len(kept), *row), kept.dtype)
        vars(self).update(
            plain_shapes=plain,
            base_shapes=base,
            adapter_shapes=adapter,
            _recipes=quantize.recipes(model),
            _graphdef=graphdef,
            _abstract=abstract,
        )

    def bind(
        self,
        base: Params,
        adapter: Params,
        *,
        exact: bool = False,
        norm_factors: Params | None = None,
    ) -> Gemma:
        """The model with base and adapter, for use inside a trace.

        Args:
            base: frozen parameters in their stored form.
            adapter: float32 parameters.
            exact: leave the adapter in float32 for the layers to cast (see `Gemma.__call__` with
                `remat`); otherwise it is cast to the base's dtype here.
            norm_factors: of `norm_factors`; None: computed here.
        """
        factors = self.norm_factors(base) if norm_factors is None else norm_factors
        flat = []
        for path, variable in nnx.to_flat_state(self._abstract):
            name = _name(path)
            if name in factors:
                value = factors[name]
            elif name in adapter:
                value = adapter[name] if exact else adapter[name].astype(variable.dtype)
            else:
                value = quantize.unpack(base[name], variable.dtype).astype(variable.dtype)
            flat.append((path, variable.replace(value)))
        return nnx.merge(self._graphdef, nnx.from_flat_state(flat))

    def norm_factors(self, base: Params) -> Params:
        """What the norms multiply by, float32, by the paths of their weights.

        For `bind` inside a loop: XLA does not move their computation out of it.
        """
        shape = self.architecture.shape
        return {
            name: norm_factor(weight, shape)
            for name, weight in base.items()
            if name.endswith("norm.scale")
        }

    def jit(self, function: Callable[..., Any], **settings: Any) -> Any:
        """`jax.jit` for the programs of this model: a float32 model computes in float32.

        By default a TPU rounds the inputs of a product of float32 matrices to bfloat16, and a GPU
        to TF32.
        """
        if self.architecture.config.param_dtype != jnp.float32:
            return jax.jit(function, **settings)

        @wraps(function)
        def precise(*args: Any) -> Any:
            with jax.default_matmul_precision("highest"):
                return function(*args)

        return jax.jit(precise, **settings)

    @staticmethod
    def embedding(base: Params) -> jax.Array:
        """The tied embedding, `vocab embed`."""
        return base[_EMBEDDING]

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return self.architecture.shape.vocab

    def abstract_params(self) -> tuple[Params, Params]:
        """Shapes of base and adapter with shardings, for ahead-of-time compilation."""
        whole = replicated(self.mesh)
        adapter = {
            name: shape.update(sharding=whole) for name, shape in self.adapter_shapes.items()
        }
        shapes = dict(self.base_shapes)
        table = {_PER_LAYER: shapes.pop(_PER_LAYER)} if self.embeddings_in_host else {}
        base = placed(shapes, self.mesh)
        base |= {name: kept.update(sharding=in_host(self.mesh)) for name, kept in table.items()}
        return base, adapter

    def plain_params(self) -> Params:
        """Shapes of the base as models are published, with the shardings of reading it."""
        plain = placed(self.plain_shapes, self.mesh)
        if self.embeddings_in_host:
            kept = plain[_PER_LAYER]
            place = kept.sharding.with_memory_kind(HOST_MEMORY)
            plain[_PER_LAYER] = kept.update(sharding=place)
        return plain

    def load_base(self, folder: Path) -> Params:
        """Loads the frozen base from a folder, sharded over the mesh.

        Quantizes on the devices, parameter by parameter; per-layer embeddings in host memory are
        never on the devices.

        Raises:
            ValueError: naming every tensor that is missing, surplus or of another shape.
        """
        return self.stored_base(weights.stream(folder, self.plain_params()))

    def stored_base(self, parameters: Iterable[tuple[str, jax.Array]]) -> Params:
        """Base parameters in their stored form, one by one from plain ones.

        Per-layer embeddings for host memory may be in their stored form already.
        """
        base: Params = {}
        shapes, _ = self.abstract_params()
        for name, value in parameters:
            recipe = self._recipes.get(name)
            if recipe is not None:
                base |= quantize.entries(name, value, recipe, shapes=shapes)
            elif value.shape == shapes[name].shape:
                base[name] = value
            else:
                rows = tiled(np.asarray(value), self.architecture.shape.host_row)
                base[name] = jax.block_until_ready(jax.device_put(rows, shapes[name].sharding))
        return base

    def parameters(self, base: Params) -> Iterator[tuple[str, Any]]:
        """The base's parameters one by one as plain arrays; dequantizes quantized ones.

        Per-layer embeddings in host memory are a NumPy array.
        """
        for name, plain in self.plain_shapes.items():
            if name == _PER_LAYER and self.embeddings_in_host:
                yield name, untiled(np.asarray(base[name]), plain.shape[1])
            else:
                yield name, quantize.parameter(name, base, self._recipes)

    @property
    def is_quantized(self) -> bool:
        """Whether any base parameter is stored quantized."""
        return bool(self._recipes)

    def quantized(self, quantization: str) -> Policy:
        """The same model and adapter with another quantization of the base."""
        if quantization == self.quantization:
            return self
        return replace(self, quantization=quantization)

    def plain(self) -> Policy:
        """The same model with an unquantized base."""
        return self.quantized("none")

    def unrounded(self) -> Policy:
        """The same model and base without quantized activations, like an export."""
        return self.quantized("int8_outputs") if self.quantization == "int8_matmul" else self

    def without_adapter(self) -> Policy:
        """The same model with an unquantized base and no adapter, for a merged base."""
        return replace(self, quantization="none", separate=False, adapted=False)

    def place_adapter(self, adapter: Mapping[str, jax.typing.ArrayLike]) -> Params:
        """An adapter on the mesh, replicated, float32.

        Raises:
            ValueError: if names or shapes differ from this policy's.
        """
        given = {name: jnp.shape(value) for name, value in adapter.items()}
        wanted = {name: shape.shape for name, shape in self.adapter_shapes.items()}
        if given != wanted:
            wrong = sorted(
                name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name)
            )
            first = wrong[0]
            raise ValueError(
                f"this adapter does not fit the model: {len(wrong)} entries differ, the first is "
                f"{first}: {given.get(first, 'absent')}, wanted {wanted.get(first, 'absent')}"
            )
        place = replicated(self.mesh)
        return {
            name: jax.device_put(jnp.asarray(value, jnp.float32), place)
            for name, value in sorted(adapter.items())
        }

    def fresh_adapter(self, seed: int) -> Params:
        """A new adapter, equal to the identity."""
        return self.place_adapter(lora_lib.fresh(self.adapter_shapes, seed=seed))

    def probe_adapter(self, seed: int) -> Params:
        """A random adapter that changes every output."""
        return self.place_adapter(lora_lib.probe(self.adapter_shapes, seed=seed))

    def no_adapter(self) -> Params:
        """An adapter of zeros: the base itself, the default reference of the KL term."""
        return self.place_adapter(
            {name: jnp.zeros(shape.shape) for name, shape in self.adapter_shapes.items()}
        )


def _name(path: tuple[object, ...]) -> str:
    return ".".join(str(part) for part in path)
