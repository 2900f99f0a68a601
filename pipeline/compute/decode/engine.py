"""The rollout engine: named requests in, completions out, with continuous batching in slots.

Decoding runs in segments on the device. Between two segments the host collects the rollouts that
have ended, assigns their slots to the next requests, and moves the remaining rollouts to fewer
slots when no request is left. Within one compiled shape a rollout does not depend on its slot or
its neighbours, so the sampled tokens are a function of names, adapter and shapes.

A rollout ends at the first of: a stop token, the token that completes a stop string, the token
limit. If one token meets several conditions, a stop token takes precedence over a stop string, and
a stop string over the limit. With `min_finished`, the remaining rollouts are truncated between two
segments. They can be continued later under any adapter: their tokens are prefilled like a prompt,
and their noise continues at the same position.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import jax
import numpy as np

from configs.schema import Config
from pipeline.clock import PhaseClock
from pipeline.compute.builds import BuildLog
from pipeline.compute.decode.cache import Caches
from pipeline.compute.decode.programs import CompiledSampler, DecodePrograms
from pipeline.compute.decode.schedule import Group, SlotAssignment, Slots
from pipeline.compute.decode.state import DecodeState, SamplingParams, SlotAdmissions
from pipeline.compute.decode.stopping import StopStrings, TextOf
from pipeline.compute.decode.timing import sampler_times
from pipeline.compute.device_memory import array_bytes
from pipeline.compute.learner.timing import plain_token
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import batch_shards, by_row
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.protocols import SamplerTimes
from pipeline.types import (
    Completion,
    DecodeWork,
    Report,
    RolloutRequest,
    Segment,
    StopReason,
)

Weights = tuple[Params, Params]
"""Base and adapter."""
_UNBOUNDED_PREFILL_BELOW = 0.5
"""Share of busy slots below which `plan.prefill_tokens` does not bound prefills."""


class Aborted(Exception):  # noqa: N818  # requested by the caller, not an error
    """Generation was aborted; unfinished rollouts are lost."""


@dataclass(frozen=True)
class FinishedSlot:
    """What was sampled in a slot, without the tokens of the request's `partial`; see `Segment`.

    Attributes:
        tokens: int32 `length`.
        logprobs: float32 `length`, under the full distribution.
        processed_logprobs: float32 `length`, under the distribution that was sampled from; None if
            that is the full one.
        stop_reason: why it left.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    processed_logprobs: np.ndarray | None
    stop_reason: StopReason

    @staticmethod
    def of(numbers: Sequence[np.ndarray | None]) -> FinishedSlot:
        """Copies a slot's tokens and log-probs, marked as truncated."""
        tokens, logprobs, processed = jax.tree.map(np.array, tuple(numbers))
        return FinishedSlot(tokens, logprobs, processed, "truncated")


@dataclass(frozen=True)
class _Call:
    """The requests of one call of `generate`, and where they are.

    Attributes:
        requests: all requests.
        slots: which of them have a slot; the result of a prefill is its bucket and the caches.
    """

    requests: Sequence[RolloutRequest]
    slots: Slots[tuple[int, Caches]]


class Engine:
    """Compiled programs and the decoding loop. Compiles at construction and on `resize`.

    Between two calls of `generate`, and after a failed one, it holds no arrays on the devices.

    Args:
        policy: the model.
        base: its frozen parameters, shared, never copied; `generate` may be given others. None:
            every call of `generate` must pass some.
        config: shapes, lengths, temperature and seed.
        vocabulary: special token ids.
        text_of: decodes tokens; required with `rollout.stop_strings`.
        log: receives an entry for each compiled program.
        phases: of the process: receives the phase `prefill`.

    Attributes:
        work: counters of the last `generate`.
    """

    def __init__(
        self,
        policy: Policy,
        base: Params | None,
        config: Config,
        vocabulary: Vocabulary,
        *,
        text_of: TextOf | None = None,
        log: BuildLog | None = None,
        phases: PhaseClock | None = None,
    ) -> None:
        self._policy = policy
        self._phases = PhaseClock() if phases is None else phases
        self._base = base
        self._vocabulary = vocabulary
        self._stop_strings: StopStrings | None = None
        if config.rollout.stop_strings:
            assert text_of is not None, "stop strings need text_of"
            self._stop_strings = StopStrings(config.rollout.stop_strings, text_of)
        self._place = by_row(policy.mesh)
        self._shards = batch_shards(policy.mesh)
        self._config: Config
        self._programs: CompiledSampler
        self.resize(config, log=log)
        self._abort = threading.Event()
        self.work = DecodeWork()

    def resize(self, config: Config, *, log: BuildLog | None = None) -> None:
        """Compiles for a configuration of other sizes; drops the existing programs first.

        After a failure the engine cannot generate until a later `resize` succeeds. `log` receives
        an entry for each compiled program.
        """
        self._config = config
        vars(self).pop("_programs", None)
        self._programs = DecodePrograms(self._policy, config, self._vocabulary).compile(log)

    @property
    def needs(self) -> dict[str, int]:
        """Bytes per device that `generate` needs besides base and adapter, by program."""
        return self._programs.needs(array_bytes(self._policy.abstract_params()))

    def times(self, base: Params, adapter: Params) -> SamplerTimes:
        """Times the programs; see `pipeline.compute.decode.timing`."""
        token = plain_token(self._vocabulary)
        return sampler_times(
            self._programs, (base, adapter), self._config, mesh=self._policy.mesh, token=token
        )

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        adapter: Params,
        version: int,
        adapter_sha256: str,
        temperature: float,
        base: Params | None = None,
        min_finished: int | None = None,
        report: Report | None = None,
    ) -> list[Completion]:
        """Samples one completion per request, in request order.

        Args:
            requests: with distinct names, which determine the noise, prompts of 1 to
                `rollout.max_prompt_tokens` tokens, and limits that leave at least one new token;
                with `partial` only with `rollout.partial = "keep"`.
            adapter: on this policy's mesh.
            version: recorded in every completion.
            adapter_sha256: recorded in every completion.
            temperature: 0 is greedy.
            base: used in place of the engine's own, with the same shapes and shardings.
            min_finished: when at least this many rollouts have ended, checked between segments,
                the others are returned with stop reason "truncated"; rollouts that have not
                started have no tokens. None: all rollouts end.
            report: receives the rollouts that have ended, after each segment.

        Raises:
            Aborted: if `abort` was called, also before this call; checked between two segments.
        """
        self._check(requests)
        base = self._base if base is None else base
        assert base is not None, "neither the engine nor generate was given a base"
        sampling = SamplingParams.of(temperature)

        def complete(index: int, slot: FinishedSlot) -> Completion:
            request = requests[index]
            earlier = () if request.partial is None else request.partial.segments
            new = Segment(
                slot.tokens, slot.logprobs, version, adapter_sha256, slot.processed_logprobs
            )
            return Completion(
                name=request.name,
                prompt_tokens=request.prompt_tokens,
                segments=(*(one for one in earlier if len(one.tokens)), new),
                stop_reason=slot.stop_reason,
            )

        def ended(found: Mapping[int, FinishedSlot]) -> None:
            if report is not None and found:
                report([complete(index, slot) for index, slot in found.items()])

        weights = (base, adapter)
        finished = self._sample(requests, weights, sampling, min_finished=min_finished, ended=ended)
        return [complete(index, slot) for index, slot in enumerate(finished)]

    def abort(self) -> None:
        """Makes `generate` raise `Aborted`, until `resume`; safe from other threads."""
        self._abort.set()

    def resume(self) -> None:
        """Clears `abort`; call it only after an aborted `generate` has raised."""
        self._abort.clear()

    def _check(self, requests: Sequence[RolloutRequest]) -> None:
        """Checks what `generate` requires; the callers make requests that meet it."""
        rollout, longest = self._config.rollout, max(self._config.prompt_buckets)
        assert len({request.name for request in requests}) == len(requests), "equal names"
        for request in requests:
            assert 1 <= len(request.prompt_tokens) <= rollout.max_prompt_tokens, request.name
            limit = self._limit(request)
            assert request.num_partial < limit <= rollout.max_new_tokens, request.name
            assert len(request.prefill_tokens) <= longest, request.name

    def _sample(
        self,
        requests: Sequence[RolloutRequest],
        weights: Weights,
        sampling: SamplingParams,
        *,
        min_finished: int | None,
        ended: Callable[[Mapping[int, FinishedSlot]], None],
    ) -> list[FinishedSlot]:
        """The decoding loop; returns the sampled tokens of each request.

        `ended` receives the rollouts that have ended, by index, after each segment.
        """
        programs, steps = self._programs, self._config.segment_steps
        sizes = list(programs.segment)
        size = sizes.pop(0)
        slots: Slots[tuple[int, Caches]] = Slots.of(requests, shards=self._shards, slots=size)
        call = _Call(requests, slots)
        self.work = DecodeWork()
        found: dict[int, FinishedSlot] = {}
        state = programs.empty()
        while True:
            if self._abort.is_set():
                raise Aborted
            new = self._collect_ended(call, state)
            found |= new
            ended(new)
            if min_finished is not None and len(found) >= min_finished:
                found |= self._truncate_rest(call, state)
                break
            with self._phases.during("prefill"):
                state = self._admit(call, state, weights)
            if not slots.busy.any():
                break
            while slots.drained and sizes:
                kept = slots.compact(sizes[0] // self._shards)
                if kept is None:
                    break
                size = sizes.pop(0)
                indices = jax.device_put(kept.astype(np.int32).reshape(-1), self._place)
                state = programs.compact[size](state, indices)
            state = programs.segment[size](*weights, state, sampling)
            self._phases.progress()
            self.work.slot_steps += size * steps
            self.work.segments[size] = self.work.segments.get(size, 0) + 1
        return [
            found[index] if index in found else self._never_started()
            for index in range(len(requests))
        ]

    def _never_started(self) -> FinishedSlot:
        """The result of a request that got no slot."""
        tokens, logprobs = (np.zeros(0, kind) for kind in (np.int32, np.float32))
        processed = logprobs if self._config.rollout.truncates else None
        return FinishedSlot.of((tokens, logprobs, processed))

    def _collect_ended(self, call: _Call, state: DecodeState) -> dict[int, FinishedSlot]:
        """Releases the slots whose rollout has ended; their tokens by index of the request.

        Drops the tokens after a stop string. The device state does not change: a released slot
        that is not assigned again decodes up to its limit, and its tokens are ignored.
        """
        ended, strings = np.array(state.done), self._stop_string_ends(call, state)
        ended[list(strings)] = True
        found = {}
        released = call.slots.release(ended)
        for slot, index, finished in self._read(call.requests, state, released, strings):
            stopped = finished.tokens[-1] in self._vocabulary.stops
            reason: StopReason = "eos" if stopped else "length"
            reason = "stop_string" if slot in strings else reason
            found[index] = replace(finished, stop_reason=reason)
        return found

    def _truncate_rest(self, call: _Call, state: DecodeState) -> dict[int, FinishedSlot]:
        """Releases all slots; the tokens so far by index of the request."""
        left = call.slots.release(np.ones(call.slots.occupants.size, bool))
        read = self._read(call.requests, state, left, {})
        return {index: finished for _, index, finished in read}

    def _read(
        self,
        requests: Sequence[RolloutRequest],
        state: DecodeState,
        released: Sequence[tuple[int, int]],
        lengths: Mapping[int, int],
    ) -> Iterator[tuple[int, int, FinishedSlot]]:
        """Reads released slots: slot, index of the request, its tokens marked as truncated.

        Args:
            requests: all requests.
            state: of all slots.
            released: slots and the index of their request.
            lengths: number of tokens to keep, for the slots that do not keep all.
        """
        if not released:
            return
        *numbers, counts = jax.device_get(
            (state.tokens, state.logprobs, state.processed_logprobs, state.count)
        )
        for slot, index in released:
            request, count = requests[index], lengths.get(slot, int(counts[slot]))
            self.work.tokens += count - request.num_partial
            own = jax.tree.map(itemgetter((slot, slice(request.num_partial, count))), numbers)
            yield slot, index, FinishedSlot.of(own)

    def _stop_string_ends(self, call: _Call, state: DecodeState) -> dict[int, int]:
        """Host check for stop strings: number of tokens to keep, by slot whose rollout has one."""
        if self._stop_strings is None:
            return {}
        tokens, counts = jax.device_get((state.tokens, state.count))
        found = {}
        for slot in np.flatnonzero(call.slots.busy).tolist():
            request = call.requests[call.slots.occupants.flat[slot]]
            partial, sampled = request.partial, tokens[slot, : counts[slot]]
            if partial is not None:
                sampled = np.concatenate([partial.tokens, sampled[len(partial.tokens) :]])
            if sampled[-1] in self._vocabulary.stops:
                sampled = sampled[:-1]
            count = self._stop_strings.end(sampled, new=self._config.segment_steps)
            if count is not None:
                found[slot] = count
        return found

    def _admit(self, call: _Call, state: DecodeState, weights: Weights) -> DecodeState:
        """Fills free slots; prefills prompts for them, up to `plan.prefill_tokens` positions.

        The bound does not apply while less than half of the slots are busy, because few rollouts
        wait for the prefill then. Waits for the prefills, whose seconds are a phase of their own.
        """
        config, slots, spent = self._config, call.slots, 0
        while True:
            for (bucket, caches), assigned in slots.assign():
                admissions = jax.device_put(self._admissions(call.requests, assigned), self._place)
                state = self._programs.fill[bucket](state, caches, admissions)
            prompt = slots.next_prompt()
            if prompt is None or not slots.needs_prefill():
                return jax.block_until_ready(state) if spent else state
            bucket = config.prompt_bucket(len(prompt))
            cost = bucket * config.prefill_rows(bucket)
            over = spent + cost > config.plan.prefill_tokens
            if spent and over and slots.busy.mean() >= _UNBOUNDED_PREFILL_BELOW:
                return jax.block_until_ready(state)
            spent += cost
            _, groups = slots.next_prefill(config.prompt_bucket, config.prefill_rows)
            slots.add_prefilled((bucket, self._prefill(bucket, groups, weights)), groups)

    def _prefill(self, bucket: int, groups: Sequence[Sequence[Group]], weights: Weights) -> Caches:
        rows = self._config.prefill_rows(bucket)
        prompts = np.full((self._shards, rows, bucket), self._vocabulary.pad, np.int32)
        lengths = np.zeros((self._shards, rows), np.int32)
        for shard, own in enumerate(groups):
            for row, group in enumerate(own):
                size = len(group.prompt_tokens)
                prompts[shard, row, :size] = group.prompt_tokens
                lengths[shard, row] = size - 1
        self.work.prompt_tokens += prompts.size
        inputs = jax.device_put((prompts.reshape(-1, bucket), lengths.reshape(-1)), self._place)
        return self._programs.prefill[bucket](*weights, *inputs)

    def _limit(self, request: RolloutRequest) -> int:
        """Maximum number of completion tokens."""
        if request.max_new_tokens is None:
            return self._config.rollout.max_new_tokens
        return request.max_new_tokens

    def _admissions(
        self, requests: Sequence[RolloutRequest], assigned: Sequence[SlotAssignment]
    ) -> np.ndarray:
        """The table of `SlotAdmissions` for these assignments."""
        per_shard = self._config.slots // self._shards
        table, count = SlotAdmissions.empty_table(self._config.slots), [0] * self._shards
        new = SlotAdmissions.of(table)
        for one in assigned:
            request, first = requests[one.member], one.shard * per_shard
            at, number = first + one.slot, first + count[one.shard]
            new.slots[number], new.rows[number] = one.slot, one.row
            count[one.shard] += 1
            tokens = request.prefill_tokens
            new.admitted[at] = True
            new.keys[at] = request.name.key(self._config.run.seed).view(np.int32)
            new.last[at], new.length[at] = tokens[-1], len(tokens) - 1
            new.num_partial[at], new.limit[at] = request.num_partial, self._limit(request)
        return table
