"""The compiled programs of a sampler: read prompts, fill slots, decode a segment, compact.

All are compiled ahead of time for fixed shapes; a call with another shape is an error, never a
silent compilation.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from configs.schema import Config
from pipeline.compute.decode.cache import (
    Caches,
    PromptAttention,
    RingCache,
    TokenAttention,
    empty_recent,
    empty_rings,
    settle,
)
from pipeline.compute.decode.compiled import Compact, Compiled
from pipeline.compute.decode.state import DecodeState, Heat, Newcomers
from pipeline.compute.model.building import Builder, results
from pipeline.compute.model.gumbel import keys_at
from pipeline.compute.model.head import Head, draw
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import (
    BATCH_AXES,
    batch_shards,
    by_row,
    by_row_and_head,
    replicated,
)
from pipeline.compute.model.truncation import Truncation
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.builds import BuildLog

T = TypeVar("T")


@dataclass(frozen=True)
class DecodePrograms:
    """Traces a sampler's programs for one policy and one configuration."""

    policy: Policy
    config: Config
    vocabulary: Vocabulary

    def empty(self) -> DecodeState:
        """All slots free."""
        slots, rollout = self.config.slots, self.config.rollout
        number, new = jnp.zeros(slots, jnp.int32), rollout.max_new_tokens
        return DecodeState(
            caches=self._empty_rings(slots, rollout.max_tokens),
            last=number,
            length=number,
            count=number,
            limit=number,
            done=jnp.ones(slots, bool),
            keys=jnp.zeros((slots, 2), jnp.uint32),
            tokens=jnp.full((slots, new), self.vocabulary.pad, jnp.int32),
            logprobs=jnp.zeros((slots, new), jnp.float32),
            processed_logprobs=jnp.zeros((slots, new), jnp.float32) if self._truncation else None,
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
        attend = PromptAttention(lengths, seq, self._eight_bits)
        _, caches = self.policy.bind(base, adapter)(prompts, positions, attend=attend)
        return caches

    def fill(self, state: DecodeState, prompts: Caches, new: Newcomers[jax.Array]) -> DecodeState:
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

        arrived = new.arrived != 0

        def where(new_value: jax.Array | int, old: jax.Array) -> jax.Array:
            here = arrived.reshape(-1, *(1 for _ in old.shape[1:]))
            return jnp.where(here, new_value, old)

        return DecodeState(
            caches=copy(state.caches, prompts, new.arrived, new.slots, new.rows),
            last=where(new.last, state.last),
            length=where(new.length, state.length),
            count=where(new.begun, state.count),
            limit=where(new.limit, state.limit),
            done=state.done & ~arrived,
            keys=where(jax.lax.bitcast_convert_type(new.keys, jnp.uint32), state.keys),
            tokens=where(self.vocabulary.pad, state.tokens),
            logprobs=where(0, state.logprobs),
            processed_logprobs=None
            if state.processed_logprobs is None
            else where(0, state.processed_logprobs),
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
        """Draws up to `segment_steps` further tokens a slot, with the loop on the device."""
        steps = self.config.segment_steps
        rings, begun = state.caches, state.length
        recent = empty_recent(
            self.policy.architecture,
            rows=len(begun),
            steps=steps,
            eight_bits=self._eight_bits,
        )

        def step(number: Int[Array, ""], state: DecodeState) -> DecodeState:
            # Bound inside: qwix notes things on the modules, which flax allows only at the trace
            # level at which they were made.
            hidden, recent = self.policy.bind(base, adapter)(
                state.last[:, None],
                state.length[:, None],
                attend=TokenAttention(begun, state.length, number),
                caches=list(zip(rings, state.caches, strict=True)),
            )
            return self._draw(base, replace(state, caches=tuple(recent)), hidden[:, 0], heat)

        drawn = jax.lax.fori_loop(0, steps, step, replace(state, caches=recent))
        settled: list[RingCache] = []
        for ring, recent_ring in zip(rings, drawn.caches, strict=True):
            # One layer after the other: a copy of each is made on the way.
            new, _ = jax.lax.optimization_barrier((recent_ring, settled[-1:]))
            settled.append(settle(ring, new, begun=begun, lengths=drawn.length))
        return replace(drawn, caches=tuple(settled))

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
            processed_logprobs=None
            if state.processed_logprobs is None
            else put(kept, state.processed_logprobs),
        )

    @property
    def _eight_bits(self) -> bool:
        return self.config.plan.kv_cache == "int8"

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
        """Where an array by slot is; those of three axes and more are rings."""
        return self._rings if x.ndim > 2 else by_row(self.policy.mesh)

    def compile(self, log: BuildLog | None = None) -> Compiled:
        """Compiles all programs, several at a time; allocates nothing.

        Args:
            log: told about each of them.
        """
        sizes, buckets = self.config.plan.slot_ladder, self.config.prompt_buckets
        with Builder(self.policy.mesh, log=log) as builder:
            # Those that take longest are asked for first.
            segment = {n: builder.build(f"segment {n}", self.trace_segment(n)) for n in sizes}
            prefill = {n: builder.build(f"prefill {n}", self.trace_prefill(n)) for n in buckets}
            fill = {n: builder.build(f"fill {n}", self.trace_fill(n)) for n in buckets}
            empty = builder.build("empty slots", self.trace_empty())
            compact = {
                small: self._build_compact(large, small, builder)
                for large, small in pairwise(sizes)
            }
            return Compiled(
                empty=empty.result(),
                prefill=results(prefill),
                fill=results(fill),
                segment=results(segment),
                compact={
                    size: Compact(rest=rest.result(), rings=results(rings))
                    for size, (rest, rings) in compact.items()
                },
            )

    def trace_empty(self) -> jax.stages.Traced:
        """The program of `empty`."""
        places = jax.tree.map(self._place, self._state(self.config.slots))
        return jax.jit(self.empty, out_shardings=places).trace()

    def trace_prefill(self, bucket: int) -> jax.stages.Traced:
        """The program of `prefill`, for prompts of at most `bucket` tokens."""
        prompts = self._prompts(bucket)
        places = jax.tree.map(self._place, self._prompt_rings(bucket))
        program = jax.jit(self.prefill, out_shardings=places)
        given = self._by_slot(prompts, bucket), self._by_slot(prompts)
        return program.trace(*self.policy.abstract_params(), *given)

    def trace_fill(self, bucket: int) -> jax.stages.Traced:
        """The program of `fill`, from prompts that the prefill of `bucket` has read."""
        slots = self.config.slots
        state, newcomers = self._state(slots), self._placed(Newcomers.none(slots))
        places = jax.tree.map(self._place, state)
        program = jax.jit(self.fill, donate_argnums=0, out_shardings=places)
        return program.trace(state, self._placed(self._prompt_rings(bucket)), newcomers)

    def trace_segment(self, slots: int) -> jax.stages.Traced:
        """The program of `segment`, for so many slots."""
        state = self._state(slots)
        scalar: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated(self.policy.mesh))
        places = jax.tree.map(self._place, state)
        program = jax.jit(self.segment, donate_argnums=2, out_shardings=places)
        return program.trace(*self.policy.abstract_params(), state, Heat(scalar, scalar))

    def _build_compact(
        self, large: int, small: int, builder: Builder
    ) -> tuple[Future[jax.stages.Compiled], dict[tuple[int, ...], Future[jax.stages.Compiled]]]:
        """The programs of a `Compact`."""
        kept, state = self._by_slot(small), self._state(large)

        def program(what: str, arrays: Any) -> Future[jax.stages.Compiled]:
            places = jax.tree.map(self._place, arrays)
            traced = jax.jit(self.compact, out_shardings=places).trace(arrays, kept)
            return builder.build(f"compact {small} {what}", traced)

        rings = {ring[0].shape: ring for ring in state.caches}
        return program("slots", replace(state, caches=())), {
            shape: program(f"rings of {shape[-2]}", ring) for shape, ring in rings.items()
        }

    def _empty_rings(self, rows: int, max_tokens: int) -> Caches:
        eight_bits = self._eight_bits
        shape = self.policy.architecture
        return empty_rings(shape, rows=rows, max_tokens=max_tokens, eight_bits=eight_bits)

    def _prompts(self, bucket: int) -> int:
        """Read by one prefill, over all devices."""
        return batch_shards(self.policy.mesh) * self.config.prefill_rows(bucket)

    def _prompt_rings(self, bucket: int) -> Any:
        """Shapes and types of what a prefill returns."""
        return jax.eval_shape(lambda: self._empty_rings(self._prompts(bucket), bucket))

    def _by_slot(self, *shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=by_row(self.policy.mesh))

    def _placed(self, arrays: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place(x)), arrays
        )

    def _state(self, slots: int) -> Any:
        """Shapes, types and places of a `DecodeState` of so many slots."""
        whole = jax.eval_shape(self.empty)
        resized = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((slots, *x.shape[1:]), x.dtype), whole
        )
        return self._placed(resized)


def _copy(
    rings: Any,
    prompts: Any,
    arrived: Int[Array, " slots"],
    slots: Int[Array, " slots"],
    rows: Int[Array, " slots"],
) -> Any:
    """Rings with some of the prompts' in front, on one device; in place, one after the other."""

    def one(number: Int[Array, ""], rings: Any) -> Any:
        def put(ring: jax.Array, prompts: jax.Array) -> jax.Array:
            prompt = jax.lax.dynamic_index_in_dim(prompts, rows[number])
            start: list[Any] = [slots[number]] + [0] * (ring.ndim - 1)
            return jax.lax.dynamic_update_slice(ring, prompt, start)

        return jax.tree.map(put, rings, prompts)

    return jax.lax.fori_loop(0, arrived.sum(), one, rings)
