"""The compiled programs of a sampler: read prompts, fill slots, decode a segment, compact.

All are compiled ahead of time for fixed shapes; a call with another shape is an error, never a
silent compilation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from configs.schema import Config
from pipeline.decode.cache import Caches, PromptAttention, TokenAttention, capacity
from pipeline.decode.state import DecodeState, Heat, Newcomers
from pipeline.model.gumbel import keys_at
from pipeline.model.head import Head, draw
from pipeline.model.policy import Params, Policy
from pipeline.model.sharding import (
    BATCH_AXES,
    batch_shards,
    build,
    by_row,
    by_row_and_head,
    replicated,
)
from pipeline.model.truncation import Truncation
from pipeline.model.vocabulary import Vocabulary

T = TypeVar("T")


@dataclass(frozen=True)
class Compact:
    """Programs that keep some of the slots.

    Layer by layer, so that beside the caches there is never more than a small copy of one layer's.

    Attributes:
        rest: of everything but the caches.
        rings: of keys and values of one layer, by their shape.
    """

    rest: jax.stages.Compiled
    rings: Mapping[tuple[int, ...], jax.stages.Compiled]

    def __call__(self, state: DecodeState, kept: jax.Array) -> DecodeState:
        """These slots of each device, numbered on it; takes the caches of `state`."""
        small, caches = self.rest(replace(state, caches=()), kept), []
        for ring in state.caches:
            caches.append(self.rings[ring[0].shape](ring, kept))
            for array in ring:
                array.delete()
        return replace(small, caches=tuple(caches))


@dataclass(frozen=True)
class Compiled:
    """A sampler's programs.

    Attributes:
        empty: makes the state with no rollout in any slot.
        prefill: reads prompts; by bucket.
        fill: puts newcomers into slots, after a prefill of this bucket; takes the state.
        segment: decodes; by slots; takes the state.
        compact: keeps some of the slots; by how many; takes the state of the next larger number.
    """

    empty: jax.stages.Compiled
    prefill: Mapping[int, jax.stages.Compiled]
    fill: Mapping[int, jax.stages.Compiled]
    segment: Mapping[int, jax.stages.Compiled]
    compact: Mapping[int, Compact]


@dataclass(frozen=True)
class DecodePrograms:
    """Traces a sampler's programs for one policy and one configuration."""

    policy: Policy
    config: Config
    vocabulary: Vocabulary

    def empty(self) -> DecodeState:
        """All slots free."""
        slots, new = self.config.plan.rollout_rows, self.config.rollout.max_new_tokens
        model, max_tokens = self.policy.architecture.config, self.config.rollout.max_tokens
        number = jnp.zeros(slots, jnp.int32)

        def ring(layer: int) -> jax.Array:
            size = capacity(window=self.policy.architecture.window(layer), max_tokens=max_tokens)
            return jnp.zeros((slots, size, model.num_kv_heads, model.head_dim), model.param_dtype)

        return DecodeState(
            caches=tuple((ring(layer), ring(layer)) for layer in range(model.num_layers)),
            last=number,
            length=number,
            count=number,
            limit=number,
            done=jnp.ones(slots, bool),
            keys=jnp.zeros((slots, 2), jnp.uint32),
            tokens=jnp.full((slots, new), self.vocabulary.pad, jnp.int32),
            logprobs=jnp.zeros((slots, new), jnp.float32),
            kept_logprobs=jnp.zeros((slots, new), jnp.float32) if self._truncation else None,
        )

    def prefill(
        self,
        base: Params,
        adapter: Params,
        prompts: Int[Array, "prompts seq"],
        lengths: Int[Array, " prompts"],
    ) -> Caches:
        """Caches of the first `lengths` tokens of each prompt.

        No logits: a rollout's first token is drawn by the segment that reads the prompt's last one,
        for each rollout of the group with its own noise.
        """
        seq = prompts.shape[1]
        positions = jnp.broadcast_to(jnp.arange(seq), prompts.shape)
        # A prompt's rings are no larger than its bucket: position p is in place p, or wrapped as in
        # the slots' own ring, which is then no larger either.
        attend = PromptAttention(lengths, seq)
        _, caches = self.policy.bind(base, adapter)(prompts, positions, attend=attend)
        return caches

    def fill(self, state: DecodeState, prompts: Caches, new: Newcomers) -> DecodeState:
        """Copies prompts into the slots of newcomers; other slots are untouched."""
        mesh, rings = self.policy.mesh, self._rings.spec
        by_slot = PartitionSpec(BATCH_AXES)
        copy = jax.shard_map(
            _copy,
            mesh=mesh,
            in_specs=(rings, rings, by_slot, by_slot, by_slot),
            out_specs=rings,
            check_vma=False,
        )

        def where(new_value: jax.Array | int, old: jax.Array) -> jax.Array:
            arrived = new.arrived.reshape(-1, *(1 for _ in old.shape[1:]))
            return jnp.where(arrived, new_value, old)

        return DecodeState(
            caches=copy(state.caches, prompts, new.count, new.slots, new.rows),
            last=where(new.last, state.last),
            length=where(new.length, state.length),
            count=where(0, state.count),
            limit=where(new.limit, state.limit),
            done=state.done & ~new.arrived,
            keys=where(new.keys, state.keys),
            tokens=where(self.vocabulary.pad, state.tokens),
            logprobs=where(0, state.logprobs),
            kept_logprobs=None if state.kept_logprobs is None else where(0, state.kept_logprobs),
        )

    def compact(self, arrays: T, kept: Int[Array, " slots"]) -> T:
        """Of arrays by slot those of these slots of each device, numbered on it."""

        def take(arrays: T, kept: jax.Array) -> T:
            return jax.tree.map(lambda x: jnp.take(x, kept, axis=0), arrays)

        specs = jax.tree.map(lambda x: self._place(x).spec, arrays)
        local = jax.shard_map(
            take,
            mesh=self.policy.mesh,
            in_specs=(specs, PartitionSpec(BATCH_AXES)),
            out_specs=specs,
            check_vma=False,
        )
        return local(arrays, kept)

    def segment(self, base: Params, adapter: Params, state: DecodeState, heat: Heat) -> DecodeState:
        """Draws up to `plan.segment_steps` further tokens a slot, with the loop on the device."""

        def step(_: Int[Array, ""], state: DecodeState) -> DecodeState:
            # Bound inside: qwix notes things on the modules, which flax allows only at the trace
            # level at which they were made.
            hidden, caches = self.policy.bind(base, adapter)(
                state.last[:, None],
                state.length[:, None],
                attend=TokenAttention(state.length),
                caches=state.caches,
            )
            kept = DecodeState(**{**vars(state), "caches": caches})
            return self._draw(base, kept, hidden[:, 0], heat)

        return jax.lax.fori_loop(0, self.config.plan.segment_steps, step, state)

    def _draw(
        self, base: Params, state: DecodeState, hidden: Float[Array, "slots embed"], heat: Heat
    ) -> DecodeState:
        """Appends one token to every rollout that has not ended."""
        rollout, plan = self.config.rollout, self.config.plan
        embedding, softcap = self.policy.embedding(base), self.policy.architecture.final_softcap
        keys = keys_at(state.keys, state.count)
        head = Head(softcap, 1.0, plan.head_tokens, plan.head_vocab, self.policy.mesh)
        drawn, logprobs, kept = draw(
            hidden,
            embedding,
            head=head,
            forbidden=self.vocabulary.forbidden_mask(self.policy.vocab_size),
            keys=keys,
            truncation=self._truncation,
            **vars(heat),
        )
        live = ~state.done
        token = jnp.where(live, drawn, self.vocabulary.pad)
        here = live[:, None] & (jnp.arange(rollout.max_new_tokens) == state.count[:, None])

        def put(new: jax.Array, old: jax.Array) -> jax.Array:
            # Not a scatter: for that devices would exchange what is written.
            return jnp.where(here, new[:, None], old)

        count = state.count + live
        ended = jnp.isin(token, jnp.asarray(self.vocabulary.stops))
        return DecodeState(
            caches=state.caches,
            last=token,
            length=state.length + live,
            count=count,
            limit=state.limit,
            done=state.done | ended | (count >= state.limit),
            keys=state.keys,
            tokens=put(token, state.tokens),
            logprobs=put(logprobs, state.logprobs),
            kept_logprobs=None if state.kept_logprobs is None else put(kept, state.kept_logprobs),
        )

    @property
    def _truncation(self) -> Truncation | None:
        """What is cut away of the distribution; None: nothing."""
        rollout = self.config.rollout
        if not rollout.truncates:
            return None
        return Truncation(rollout.top_k, rollout.top_p, rollout.min_p)

    @property
    def _rings(self) -> NamedSharding:
        """Where a ring is."""
        kv_heads = self.policy.architecture.config.num_kv_heads
        return by_row_and_head(self.policy.mesh, kv_heads=kv_heads)

    def _place(self, x: jax.Array) -> NamedSharding:
        """Where an array by slot is; those of four axes are rings."""
        return self._rings if x.ndim == 4 else by_row(self.policy.mesh)

    def compile(self) -> Compiled:
        """Compiles all programs; allocates nothing."""
        mesh, config = self.policy.mesh, self.config
        whole, rows = replicated(mesh), by_row(mesh)
        base, adapter = self.policy.abstract_params()
        scalar: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        heat = Heat(scalar, scalar)

        def by_slot(*shape: int, dtype: Any = jnp.int32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

        slots, shards = config.plan.rollout_rows, batch_shards(mesh)
        places = jax.tree.map(self._place, self._state(slots))
        prefill = jax.jit(self.prefill, out_shardings=places.caches)
        fill = jax.jit(self.fill, donate_argnums=0, out_shardings=places)
        segment = jax.jit(self.segment, donate_argnums=2, out_shardings=places)
        newcomers = Newcomers(
            count=by_slot(shards),
            slots=by_slot(slots),
            rows=by_slot(slots),
            arrived=by_slot(slots, dtype=bool),
            last=by_slot(slots),
            length=by_slot(slots),
            limit=by_slot(slots),
            keys=by_slot(slots, 2, dtype=jnp.uint32),
        )
        prefills, fills = {}, {}
        for bucket in config.prompt_buckets:
            prompts = shards * config.prefill_rows(bucket)
            traced = prefill.trace(base, adapter, by_slot(prompts, bucket), by_slot(prompts))
            caches = jax.tree.map(
                lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                traced.out_info,
                places.caches,
            )
            prefills[bucket] = build(traced, mesh)
            fills[bucket] = build(fill.trace(self._state(slots), caches, newcomers), mesh)
        return Compiled(
            empty=build(jax.jit(self.empty, out_shardings=places).trace(), mesh),
            prefill=prefills,
            fill=fills,
            segment={
                size: build(segment.trace(base, adapter, self._state(size), heat), mesh)
                for size in config.plan.slots
            },
            compact={
                small: self._compile_compact(self._state(large), by_slot(small))
                for large, small in pairwise(config.plan.slots)
            },
        )

    def _state(self, slots: int) -> Any:
        """Shapes, types and places of a `DecodeState` of so many slots."""

        def array(x: Any) -> jax.ShapeDtypeStruct:
            shape = (slots, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self._place(x))

        return jax.tree.map(array, jax.eval_shape(self.empty))

    def _compile_compact(self, state: DecodeState, kept: Any) -> Compact:
        def program(arrays: Any) -> jax.stages.Compiled:
            places = jax.tree.map(self._place, arrays)
            traced = jax.jit(self.compact, out_shardings=places).trace(arrays, kept)
            return build(traced, self.policy.mesh)

        rings = {ring[0].shape: ring for ring in state.caches}
        return Compact(
            rest=program(replace(state, caches=())),
            rings={shape: program(ring) for shape, ring in rings.items()},
        )


def _copy(
    rings: Any,
    prompts: Any,
    count: Int[Array, " 1"],
    slots: Int[Array, " slots"],
    rows: Int[Array, " slots"],
) -> Any:
    """Rings with some of the prompts' in front, on one device; in place, one after the other."""

    def one(number: Int[Array, ""], rings: Any) -> Any:
        def put(ring: jax.Array, prompts: jax.Array) -> jax.Array:
            prompt = jax.lax.dynamic_index_in_dim(prompts, rows[number])
            return jax.lax.dynamic_update_slice(ring, prompt, (slots[number], 0, 0, 0))

        return jax.tree.map(put, rings, prompts)

    return jax.lax.fori_loop(0, count[0], one, rings)
