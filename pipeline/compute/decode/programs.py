"""The compiled programs of a sampler: prefill, fill slots, decode a segment, compact slots.

All programs are compiled ahead of time for fixed shapes; a call with another shape is an error,
never a silent compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from configs.plan import HEAD_TOKENS, HEAD_VOCAB
from configs.schema import Config
from pipeline.compute.builds import BuildLog
from pipeline.compute.decode.cache import (
    Caches,
    PromptAttention,
    TokenAttention,
    empty_rings,
    flush,
    ring_slots,
)
from pipeline.compute.decode.state import DecodeState, SamplingParams, SlotAdmissions
from pipeline.compute.device_memory import argument_bytes, array_bytes, program_bytes, result_bytes
from pipeline.compute.model.building import Trace, build_all
from pipeline.compute.model.gumbel import keys_at
from pipeline.compute.model.head import Head
from pipeline.compute.model.head_sample import sample
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import (
    BATCH_AXES,
    batch_shards,
    by_row,
    by_row_and_head,
    platform,
    replicated,
)
from pipeline.compute.model.truncation import Truncation
from pipeline.compute.model.vocabulary import Vocabulary

T = TypeVar("T")

_EMPTY = "empty slots"

_VMEM_OPTION = "xla_tpu_scoped_vmem_limit_kib"
"""XLA's option for the VMEM that an instruction may use on a TPU; the default is 16 MiB."""
_READ_AHEAD = 2**26
"""Bytes below which a ring is expected to be read ahead: half of a v5e's VMEM."""


@dataclass(frozen=True)
class CompactProgram:
    """Keeps some of the slots.

    Runs layer by layer, so that only a small copy of one layer's cache exists besides the caches.

    Attributes:
        rest: compacts all of the state except the caches.
        rings: compacts the ring cache of one layer; by shape of the keys.
    """

    rest: jax.stages.Compiled
    rings: Mapping[tuple[int, ...], jax.stages.Compiled]

    def __call__(self, state: DecodeState, kept: jax.Array) -> DecodeState:
        """The `kept` slots, numbered per device; deletes the caches of `state`."""
        small, caches = self.rest(replace(state, caches=()), kept), []
        for ring in state.caches:
            caches.append(self.rings[ring[0].shape](ring, kept))
            for array in ring:
                array.delete()
        return replace(small, caches=tuple(caches))


@dataclass(frozen=True)
class CompiledSampler:
    """The compiled programs of a sampler.

    Attributes:
        empty: makes the state of empty slots.
        prefill: computes the caches of prompts; by bucket.
        fill: admits rollouts to slots after a prefill of this bucket; donates the state.
        segment: decodes; by number of slots; donates the state.
        compact: keeps some of the slots; by number of kept slots; takes the state of the next
            larger number.
    """

    empty: jax.stages.Compiled
    prefill: Mapping[int, jax.stages.Compiled]
    fill: Mapping[int, jax.stages.Compiled]
    segment: Mapping[int, jax.stages.Compiled]
    compact: Mapping[int, CompactProgram]

    def needs(self, weights: int) -> dict[str, int]:
        """Peak bytes per device besides base and adapter, by program.

        Counts the slots, which always exist, and one prefilled batch that waits for slots while
        other slots decode or other prompts are read.

        Args:
            weights: bytes per device of base and adapter.
        """
        slots, waiting = result_bytes(self.empty), max(map(result_bytes, self.prefill.values()))
        named = {"segment": (self.segment, waiting - weights), "fill": (self.fill, 0)}
        found = {
            f"{name} {size}": program_bytes(program) + beside
            for name, (programs, beside) in named.items()
            for size, program in programs.items()
        }
        for size, program in self.prefill.items():
            # Besides prompts it reads weights, but not of layers without keys and values.
            own = program_bytes(program) - argument_bytes(program)
            found[f"prefill {size}"] = own + waiting + slots
        return found


@dataclass(frozen=True)
class DecodePrograms:
    """Traces and compiles a sampler's programs for one policy and one configuration."""

    policy: Policy
    config: Config
    vocabulary: Vocabulary

    def empty(self) -> DecodeState:
        """State with all slots free."""
        slots, rollout = self.config.slots, self.config.rollout
        number, new = jnp.zeros(slots, jnp.int32), rollout.max_new_tokens
        return DecodeState(
            caches=self._empty_rings(slots, self._ring_slots(rollout.max_tokens)),
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

        Computes no logits: the segment that reads the prompt's last token samples the first token
        of each rollout of the group, each with its own noise.
        """
        seq = prompts.shape[1]
        positions = jnp.broadcast_to(jnp.arange(seq), prompts.shape)
        # A prompt's rings are no larger than its bucket: position p is at index p, or wrapped as in
        # the slots' own ring, which then has the same size.
        attend = PromptAttention(lengths, seq, self._eight_bits)
        _, caches = self.policy.bind(base, adapter)(prompts, positions, attend=attend)
        return caches

    def fill(
        self, state: DecodeState, prompts: Caches, table: Int[Array, "slots 9"]
    ) -> DecodeState:
        """Copies prompts into the admitted slots of `SlotAdmissions`; others do not change."""
        new, mesh, rings = SlotAdmissions.of(table), self.policy.mesh, self._rings.spec
        by_slot = PartitionSpec(BATCH_AXES)
        copy = jax.shard_map(
            _copy,
            mesh=mesh,
            in_specs=(rings, rings, by_slot, by_slot, by_slot),
            out_specs=rings,
            check_vma=False,
        )
        admitted = new.admitted != 0

        def where(new_value: jax.Array | int, old: jax.Array) -> jax.Array:
            here = admitted.reshape(-1, *(1 for _ in old.shape[1:]))
            return jnp.where(here, new_value, old)

        return replace(
            state,
            caches=copy(state.caches, prompts, new.admitted, new.slots, new.rows),
            last=where(new.last, state.last),
            length=where(new.length, state.length),
            count=where(new.num_partial, state.count),
            limit=where(new.limit, state.limit),
            done=state.done & ~admitted,
            keys=where(jax.lax.bitcast_convert_type(new.keys, jnp.uint32), state.keys),
            tokens=where(self.vocabulary.pad, state.tokens),
            logprobs=where(0, state.logprobs),
            processed_logprobs=jax.tree.map(partial(where, 0), state.processed_logprobs),
        )

    def compact(self, arrays: T, kept: Int[Array, " slots"]) -> T:
        """The `kept` slots of arrays that are indexed by slot, numbered per device."""

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

    def segment(
        self, base: Params, adapter: Params, state: DecodeState, sampling: SamplingParams
    ) -> DecodeState:
        """Samples up to `segment_steps` tokens per slot, with the loop on the device."""
        steps = self.config.segment_steps
        rings, start = state.caches, state.length
        recent = self._empty_rings(len(start), [steps] * len(rings))
        norm_factors = self.policy.norm_factors(base)

        def step(number: Int[Array, ""], state: DecodeState) -> DecodeState:
            # Bound inside the loop: qwix stores attributes on the modules, which flax allows only
            # at the trace level at which they were made.
            hidden, recent = self.policy.bind(base, adapter, norm_factors=norm_factors)(
                state.last[:, None],
                state.length[:, None],
                attend=TokenAttention(start, state.length, number),
                caches=list(zip(rings, state.caches, strict=True)),
            )
            return self._sample(base, replace(state, caches=tuple(recent)), hidden[:, 0], sampling)

        decoded = jax.lax.fori_loop(0, steps, step, replace(state, caches=recent))
        # On each device by itself: devices would exchange the values that a scatter writes.
        by_slot = PartitionSpec(BATCH_AXES)
        local = jax.shard_map(
            flush,
            mesh=self.policy.mesh,
            in_specs=(self._rings.spec, self._rings.spec, by_slot, by_slot),
            out_specs=self._rings.spec,
            check_vma=False,
        )
        return replace(decoded, caches=local(rings, decoded.caches, start, decoded.length))

    def _sample(
        self,
        base: Params,
        state: DecodeState,
        hidden: Float[Array, "slots embed"],
        sampling: SamplingParams,
    ) -> DecodeState:
        """Appends one token to every rollout that has not ended."""
        rollout = self.config.rollout
        embedding, softcap = (
            self.policy.embedding(base),
            self.policy.architecture.shape.final_softcap,
        )
        keys = keys_at(state.keys, state.count)
        head = Head(softcap, 1.0, HEAD_TOKENS, HEAD_VOCAB, self.policy.mesh)
        sampled, logprobs, processed = sample(
            hidden,
            embedding,
            head=head,
            forbidden=self.vocabulary.forbidden_mask(self.policy.vocab_size),
            keys=keys,
            truncation=self._truncation,
            **vars(sampling),
        )
        live = ~state.done
        token = jnp.where(live, sampled, self.vocabulary.pad)
        here = live[:, None] & (jnp.arange(rollout.max_new_tokens) == state.count[:, None])

        def put(new: jax.Array, old: jax.Array) -> jax.Array:
            # Not a scatter, for which devices would exchange the written values.
            return jnp.where(here, new[:, None], old)

        count = state.count + live
        ended = jnp.isin(token, jnp.asarray(self.vocabulary.stops))
        return replace(
            state,
            last=token,
            length=state.length + live,
            count=count,
            done=state.done | ended | (count >= state.limit),
            tokens=put(token, state.tokens),
            logprobs=put(logprobs, state.logprobs),
            processed_logprobs=jax.tree.map(partial(put, processed), state.processed_logprobs),
        )

    @property
    def _eight_bits(self) -> bool:
        return self.config.plan.kv_cache == "int8"

    @property
    def _truncation(self) -> Truncation | None:
        """Top-k, top-p and min-p; None if all are off."""
        rollout = self.config.rollout
        if not rollout.truncates:
            return None
        return Truncation(rollout.top_k, rollout.top_p, rollout.min_p)

    @property
    def _rings(self) -> NamedSharding:
        """Sharding of a ring."""
        kv_heads = self.policy.architecture.config.num_kv_heads
        return by_row_and_head(self.policy.mesh, kv_heads=kv_heads)

    def _place(self, x: jax.Array) -> NamedSharding:
        """Sharding of an array that is indexed by slot; three axes or more mean a ring."""
        return self._rings if x.ndim > 2 else by_row(self.policy.mesh)

    def compile(self, log: BuildLog | None = None) -> CompiledSampler:
        """Compiles all programs, several at a time; `log` receives an entry for each."""
        built = build_all(self.programs, self.policy.mesh, log=log)
        sizes, buckets = self.config.plan.slot_ladder, self.config.prompt_buckets
        return CompiledSampler(
            empty=built[_EMPTY],
            prefill={n: built[f"prefill {n}"] for n in buckets},
            fill={n: built[f"fill {n}"] for n in buckets},
            segment={n: built[f"segment {n}"] for n in sizes},
            compact={
                small: CompactProgram(
                    rest=built[_compact_slots(small)],
                    rings={
                        shape: built[_compact_rings(small, shape)]
                        for shape in self._rings_by_shape(self._state(large))
                    },
                )
                for large, small in pairwise(sizes)
            },
        )

    @property
    def programs(self) -> dict[str, Trace]:
        """What `compile` compiles, by name, the slowest compilations first."""
        sizes, buckets = self.config.plan.slot_ladder, self.config.prompt_buckets
        found: dict[str, Trace] = {
            **{f"segment {n}": partial(self.trace_segment, n) for n in sizes},
            **{f"prefill {n}": partial(self.trace_prefill, n) for n in buckets},
            **{f"fill {n}": partial(self.trace_fill, n) for n in buckets},
            _EMPTY: self.trace_empty,
        }
        for large, small in pairwise(sizes):
            state = self._state(large)
            rest = replace(state, caches=())
            found[_compact_slots(small)] = partial(self._trace_compact, rest, small)
            for shape, ring in self._rings_by_shape(state).items():
                found[_compact_rings(small, shape)] = partial(self._trace_compact, ring, small)
        return found

    def trace_empty(self) -> jax.stages.Traced:
        """Traces `empty`."""
        return self._jit(self.empty, like=self._state(self.config.slots)).trace()

    def trace_prefill(self, bucket: int) -> jax.stages.Traced:
        """Traces `prefill` for prompts of at most `bucket` tokens."""
        prompts = self._prompts(bucket)
        program = self._jit(self.prefill, like=self._prompt_rings(bucket))
        given = self._by_slot(prompts, bucket), self._by_slot(prompts)
        return program.trace(*self.policy.abstract_params(), *given)

    def trace_fill(self, bucket: int) -> jax.stages.Traced:
        """Traces `fill` for the result of the prefill of `bucket`."""
        slots = self.config.slots
        state, admissions = self._state(slots), self._placed(SlotAdmissions.empty_table(slots))
        program = self._jit(self.fill, like=state, donate_argnums=0)
        return program.trace(state, self._placed(self._prompt_rings(bucket)), admissions)

    def trace_segment(self, slots: int) -> jax.stages.Traced:
        """Traces `segment` for a number of slots."""
        state = self._state(slots)
        scalar: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated(self.policy.mesh))
        options = self._tpu_options(state) if platform(self.policy.mesh) == "tpu" else None
        program = self._jit(self.segment, like=state, donate_argnums=2, compiler_options=options)
        sampling = SamplingParams(scalar, scalar)
        return program.trace(*self.policy.abstract_params(), state, sampling)

    def _tpu_options(self, state: Any) -> dict[str, str]:
        """Compiler options of `segment`.

        With more VMEM for an instruction, attention reads the rings in larger blocks; with less,
        more is read ahead, rings among it unless they are too large for that.
        """
        mib = 32 if array_bytes(state.caches[0][0]) < _READ_AHEAD else 48
        return {_VMEM_OPTION: f"{mib * 1024}"}

    def _trace_compact(self, arrays: Any, small: int) -> jax.stages.Traced:
        """Traces `compact` for arrays of a larger number of slots."""
        return self._jit(self.compact, like=arrays).trace(arrays, self._by_slot(small))

    def _rings_by_shape(self, state: Any) -> dict[tuple[int, ...], Any]:
        """One ring cache of each shape."""
        return {ring[0].shape: ring for ring in state.caches}

    def _jit(self, function: Callable[..., Any], *, like: Any, **settings: Any) -> Any:
        """Jits a function whose result is sharded like arrays of these shapes."""
        return self.policy.jit(function, out_shardings=jax.tree.map(self._place, like), **settings)

    def _ring_slots(self, max_tokens: int) -> list[int]:
        return ring_slots(self.policy.architecture, max_tokens=max_tokens)

    def _empty_rings(self, rows: int, slots: Iterable[int]) -> Caches:
        shape, eight_bits = self.policy.architecture, self._eight_bits
        return empty_rings(shape, rows=rows, slots=slots, eight_bits=eight_bits)

    def _prompts(self, bucket: int) -> int:
        """Rows of one prefill, over all devices."""
        return batch_shards(self.policy.mesh) * self.config.prefill_rows(bucket)

    def _prompt_rings(self, bucket: int) -> Any:
        """Shapes and dtypes of a prefill's result."""
        rows, slots = self._prompts(bucket), self._ring_slots(bucket)
        return jax.eval_shape(lambda: self._empty_rings(rows, slots))

    def _by_slot(self, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=by_row(self.policy.mesh))

    def _placed(self, arrays: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place(x)), arrays
        )

    def _state(self, slots: int) -> Any:
        """Shapes, dtypes and shardings of a `DecodeState` with this number of slots."""
        whole = jax.eval_shape(self.empty)
        resized = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((slots, *x.shape[1:]), x.dtype), whole
        )
        return self._placed(resized)


def _compact_slots(small: int) -> str:
    """Name of the program that keeps `small` slots, without their caches."""
    return f"compact {small} slots"


def _compact_rings(small: int, shape: tuple[int, ...]) -> str:
    """Name of the program that keeps `small` slots of ring caches of this shape."""
    return f"compact {small} rings of {'x'.join(map(str, shape[1:]))}"


def _copy(
    rings: Any,
    prompts: Any,
    admitted: Int[Array, " slots"],
    slots: Int[Array, " slots"],
    rows: Int[Array, " slots"],
) -> Any:
    """Copies rows of `prompts` into `slots` of the rings, on one device, one after another."""

    def one(number: Int[Array, ""], rings: Any) -> Any:
        def put(ring: jax.Array, prompts: jax.Array) -> jax.Array:
            prompt = jax.lax.dynamic_index_in_dim(prompts, rows[number])
            start: list[Any] = [slots[number]] + [0] * (ring.ndim - 1)
            return jax.lax.dynamic_update_slice(ring, prompt, start)

        return jax.tree.map(put, rings, prompts)

    return jax.lax.fori_loop(0, admitted.sum(), one, rings)
