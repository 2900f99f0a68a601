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
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from configs.schema import Config
from pipeline.decode.cache import Caches, PromptAttention, TokenAttention, capacity
from pipeline.decode.sampling import sample
from pipeline.model.gumbel import keys_at
from pipeline.model.head import Head, draw, scaled_logits
from pipeline.model.policy import Params, Policy
from pipeline.model.sharding import (
    BATCH_AXES,
    batch_shards,
    build,
    by_row,
    by_row_and_head,
    replicated,
)
from pipeline.model.vocabulary import Vocabulary

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heat:
    """Sampling temperature as the programs take it, so that greedy needs no program of its own.

    Attributes:
        temperature: divides the logits; log-probs are those of the scaled distribution.
        noise: 1.0 draws, 0.0 takes the likeliest token.
    """

    temperature: Float[Array, ""]
    noise: Float[Array, ""]

    @staticmethod
    def of(temperature: float) -> Heat:
        """Temperature 0 means greedy; its log-probs are those at temperature 1."""
        scaled, noise = (temperature, 1.0) if temperature > 0 else (1.0, 0.0)
        # Through NumPy: `jnp.float32(x)` would compile a conversion.
        return Heat(*jax.device_put((np.float32(scaled), np.float32(noise))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The slots.

    Attributes:
        caches: one ring cache a layer.
        last: each slot's newest token, not yet in the caches.
        length: positions in each slot's caches, which is the position of `last`.
        count: tokens drawn so far.
        limit: tokens that are drawn at most.
        done: slots whose rollout has ended, or that never had one; what they draw means nothing.
        keys: each rollout's random key.
        tokens: drawn tokens, the padding token behind a rollout's end.
        logprobs: their log-probs.
    """

    caches: Caches
    last: Int[Array, " slots"]
    length: Int[Array, " slots"]
    count: Int[Array, " slots"]
    limit: Int[Array, " slots"]
    done: Bool[Array, " slots"]
    keys: UInt32[Array, "slots 2"]
    tokens: Int[Array, "slots new"]
    logprobs: Float[Array, "slots new"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Newcomers:
    """Rollouts that slots are given to. Everything is by slot, but the first three.

    Attributes:
        count: of newcomers on each device.
        slots: `count` slots of each device, numbered on it, that caches are copied to.
        rows: the row of their prompt among those that the device has read.
        arrived: slots that are given to a newcomer; elsewhere the following mean nothing.
        last: the prompt's last token.
        length: tokens of the prompt before that.
        limit: see `DecodeState`.
        keys: see `DecodeState`.
    """

    count: Int[Array, " shards"]
    slots: Int[Array, " slots"]
    rows: Int[Array, " slots"]
    arrived: Bool[Array, " slots"]
    last: Int[Array, " slots"]
    length: Int[Array, " slots"]
    limit: Int[Array, " slots"]
    keys: UInt32[Array, "slots 2"]


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
        shared = {"forbidden": self.vocabulary.forbidden_mask(self.policy.vocab_size)}
        if rollout.top_k or rollout.top_p < 1.0:
            logits = scaled_logits(
                hidden, embedding, softcap=softcap, temperature=heat.temperature, **shared
            )
            drawn, logprobs = sample(
                logits, keys, noise=heat.noise, top_k=rollout.top_k, top_p=rollout.top_p
            )
        else:
            head = Head(softcap, 1.0, plan.head_tokens, plan.head_vocab, self.policy.mesh)
            drawn, logprobs = draw(hidden, embedding, head=head, keys=keys, **vars(heat), **shared)
        live = ~state.done
        token = jnp.where(live, drawn, self.vocabulary.pad)
        # Not a scatter: for that devices would exchange what is written.
        here = live[:, None] & (jnp.arange(rollout.max_new_tokens) == state.count[:, None])
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
            tokens=jnp.where(here, token[:, None], state.tokens),
            logprobs=jnp.where(here, logprobs[:, None], state.logprobs),
        )

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

        whole_state = jax.eval_shape(self.empty)
        places = jax.tree.map(self._place, whole_state)

        def state(slots: int) -> DecodeState:
            return jax.tree.map(
                lambda x, place: jax.ShapeDtypeStruct(
                    (slots, *x.shape[1:]), x.dtype, sharding=place
                ),
                whole_state,
                places,
            )

        def compact(large: int, small: int) -> Compact:
            def program(arrays: Any) -> jax.stages.Compiled:
                out = jax.tree.map(self._place, arrays)
                traced = jax.jit(self.compact, out_shardings=out).trace(arrays, by_slot(small))
                return build(traced, mesh)

            given = state(large)
            rings = {ring[0].shape: ring for ring in given.caches}
            return Compact(
                rest=program(replace(given, caches=())),
                rings={shape: program(ring) for shape, ring in rings.items()},
            )

        slots, shards = config.plan.rollout_rows, batch_shards(mesh)
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
            fills[bucket] = build(fill.trace(state(slots), caches, newcomers), mesh)
        return Compiled(
            empty=build(jax.jit(self.empty, out_shardings=places).trace(), mesh),
            prefill=prefills,
            fill=fills,
            segment={
                size: build(segment.trace(base, adapter, state(size), heat), mesh)
                for size in config.plan.slots
            },
            compact={small: compact(large, small) for large, small in pairwise(config.plan.slots)},
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
