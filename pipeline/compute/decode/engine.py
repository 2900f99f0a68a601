"""The rollout engine: named requests in, completions out, through slots that never wait.

Decoding runs in segments on the device; between two of them the host takes what has ended, gives
its slots to who comes next, and when nobody is left moves the rest into fewer slots. Within a
compiled shape a rollout does not depend on its slot or its neighbours, so what is drawn is a
function of names, adapter and shapes.

A rollout ends at the first of: a stop token, the token that completes a stop string, the last token
that it may have. Where one token does two of these, a stop token counts before a stop string, and a
stop string before the length. Where only so many have to end, the rest is cut between two segments
and can be asked for again, under any adapter: what it has drawn is read like a prompt, its noise
goes on where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from configs.schema import Config
from pipeline.compute.decode.cache import Caches
from pipeline.compute.decode.compiled import Compiled
from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.decode.schedule import Given, Group, Held, Slots
from pipeline.compute.decode.state import DecodeState, Heat, Newcomers
from pipeline.compute.decode.stopping import StopStrings, TextOf
from pipeline.compute.decode.taken import Taken
from pipeline.compute.decode.timing import sampler_speed
from pipeline.compute.model.footprint import array_bytes
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import batch_shards, by_row
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.builds import BuildLog
from pipeline.contracts.rollouts import (
    Completion,
    DecodeWork,
    RolloutName,
    RolloutRequest,
    StopReason,
)
from pipeline.contracts.speeds import SamplerSpeed

Weights = tuple[Params, Params]
"""Base and adapter."""
_FEW = 0.5
"""Share of the slots below which prompts are read without a bound between two segments."""


class Aborted(Exception):  # noqa: N818  # not an error: somebody asked for it
    """Generation was told to stop; what was in flight is lost."""


class Engine:
    """Compiled programs and the loop around them. Compiles when it is made, and when resized.

    Between two calls of `generate`, and after one that failed, it holds nothing on the devices.

    Args:
        policy: the model.
        base: its frozen parameters, shared, never copied; `generate` may be given others. None: it
            is always given some.
        config: shapes, lengths, temperature and seed.
        vocabulary: token ids with a meaning.
        text_of: what tokens read as; only `rollout.stop_strings` need it.
        log: told about each program.

    Attributes:
        work: of the last `generate`.
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
    ) -> None:
        self._policy = policy
        self._base = base
        self._vocabulary = vocabulary
        self._stop_strings: StopStrings | None = None
        if config.rollout.stop_strings:
            assert text_of is not None, "stop strings are text"
            self._stop_strings = StopStrings(config.rollout.stop_strings, text_of)
        self._place = by_row(policy.mesh)
        self._shards = batch_shards(policy.mesh)
        self._config: Config
        self._programs: Compiled
        self.resize(config, log=log)
        self._abort = threading.Event()
        self.work = DecodeWork()

    def resize(self, config: Config, *, log: BuildLog | None = None) -> None:
        """Compiles for the sizes of another configuration; the programs there were are gone first.

        If that fails, nothing can be drawn before it succeeds for other sizes.

        Args:
            config: differs in sizes only.
            log: told about each program.
        """
        self._config = config
        vars(self).pop("_programs", None)
        self._programs = DecodePrograms(self._policy, config, self._vocabulary).compile(log)

    @property
    def needs(self) -> dict[str, int]:
        """Bytes of each device that `generate` takes beside base and adapter, by program."""
        return self._programs.needs(array_bytes(self._policy.abstract_params()))

    def speed(self, base: Params, adapter: Params) -> SamplerSpeed:
        """How long its programs take; see `pipeline.compute.decode.timing`."""
        return sampler_speed(self._programs, (base, adapter), self._config, self._vocabulary)

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
    ) -> list[Completion]:
        """Draws one completion for each request, in their order.

        Args:
            requests: prompts of at most `rollout.max_prompt_tokens` tokens; begun ones only where
                `rollout.partial` keeps them.
            adapter: on this policy's mesh.
            version: written on every completion.
            adapter_sha256: likewise.
            temperature: 0 is greedy.
            base: used in place of the engine's own, in the same shapes and places.
            min_finished: once this many have ended, checked between segments, the rest come back as
                they are then, "cut"; who was not begun, without any token. None: all of them.

        Raises:
            Aborted: if `abort` was called, also before; noticed between two segments.
            ValueError: if two requests have one name; if a prompt is empty or longer than
                `rollout.max_prompt_tokens`; if one asks for more tokens than
                `rollout.max_new_tokens`, or for none beyond those that it has. Nothing has been
                computed then.
        """
        self._check(requests)
        base = self._base if base is None else base
        assert base is not None, "an engine without a base was given none"
        drawn = self._draw(
            requests, (base, adapter), Heat.of(temperature), min_finished=min_finished
        )
        return [
            Completion(
                name=request.name,
                prompt_tokens=request.prompt_tokens,
                **vars(found),
                version=version,
                adapter_sha256=adapter_sha256,
                begun=() if request.begun is None else request.begun.version_spans,
            )
            for request, found in zip(requests, drawn, strict=True)
        ]

    def abort(self) -> None:
        """Makes `generate` raise `Aborted`, until `resume`; safe from other threads."""
        self._abort.set()

    def resume(self) -> None:
        """Lets `generate` work again; not while one is still to notice that it was aborted."""
        self._abort.clear()

    def _check(self, requests: Sequence[RolloutRequest]) -> None:
        """Refuses requests that cannot be drawn; see `generate`."""
        rollout, longest = self._config.rollout, max(self._config.prompt_buckets)
        names: set[RolloutName] = set()
        for request in requests:
            if request.name in names:
                raise ValueError(f"{request.name}: two requests have this name, so the same noise")
            names.add(request.name)
            prompt, read = len(request.prompt_tokens), len(request.read_tokens)
            if not 1 <= prompt <= rollout.max_prompt_tokens:
                raise ValueError(
                    f"{request.name}: its prompt has {prompt} tokens: must be from 1 to "
                    f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens}"
                )
            if not request.num_begun < self._limit(request) <= rollout.max_new_tokens:
                raise ValueError(
                    f"{request.name}: max_new_tokens = {request.max_new_tokens}: must be from "
                    f"{request.num_begun + 1} to rollout.max_new_tokens = {rollout.max_new_tokens}"
                )
            if read > longest:
                raise ValueError(
                    f"{request.name}: its prompt has {prompt} tokens and its begun completion "
                    f"{request.num_begun}: at most {longest} are read; "
                    f'rollout.partial = "{rollout.partial}"'
                )

    def _draw(
        self,
        requests: Sequence[RolloutRequest],
        weights: Weights,
        heat: Heat,
        *,
        min_finished: int | None,
    ) -> list[Taken]:
        """What was drawn for each request."""
        programs, steps = self._programs, self._config.segment_steps
        sizes = list(programs.segment)
        size = sizes.pop(0)
        slots: Slots[tuple[int, Caches]] = Slots.of(requests, shards=self._shards, slots=size)
        self.work, held = DecodeWork(), self._held(requests)
        found: dict[int, Taken] = {}
        state = programs.empty()
        while True:
            if self._abort.is_set():
                raise Aborted
            found |= self._take_ended(requests, state, slots, held)
            if min_finished is not None and len(found) >= min_finished:
                found |= self._take_rest(requests, state, slots)
                break
            state = self._let_in(requests, state, slots, weights)
            if not slots.busy.any():
                break
            while slots.drained and sizes:
                kept = slots.compact(sizes[0] // self._shards)
                if kept is None:
                    break
                size = sizes.pop(0)
                at = jax.device_put(kept.astype(np.int32).reshape(-1), self._place)
                state = programs.compact[size](state, at)
            state = programs.segment[size](*weights, state, heat)
            held.count(slots.holders)
            self.work.slot_steps += size * steps
            self.work.segments[size] = self.work.segments.get(size, 0) + 1
        truncated = self._config.rollout.truncates
        return [
            found[place] if place in found else Taken.before(request, truncated=truncated)
            for place, request in enumerate(requests)
        ]

    def _take_ended(
        self,
        requests: Sequence[RolloutRequest],
        state: DecodeState,
        slots: Slots[tuple[int, Caches]],
        held: Held,
    ) -> dict[int, Taken]:
        """What the slots that have ended have drawn, by place of the request.

        What a rollout drew behind a stop string, in the same segment, is thrown away. The device is
        not told: a slot that nobody is given draws on until its limit, and nobody looks.
        """
        ended, strings = np.array(state.done), self._stop_strings_in(requests, state, slots)
        ended[list(strings)] = True
        ended &= ~held.keeps(slots.holders).reshape(-1)
        found = {}
        for slot, place, drawn in self._taken(requests, state, slots.release(ended), strings):
            stopped = drawn.tokens[-1] in self._vocabulary.stops
            reason: StopReason = "eos" if stopped else "length"
            found[place] = replace(drawn, stop_reason="stop_string" if slot in strings else reason)
        return found

    def _take_rest(
        self,
        requests: Sequence[RolloutRequest],
        state: DecodeState,
        slots: Slots[tuple[int, Caches]],
    ) -> dict[int, Taken]:
        """What everybody who is in a slot has drawn so far; all slots are free then."""
        left = slots.release(np.ones(slots.holders.size, bool))
        return {place: drawn for _, place, drawn in self._taken(requests, state, left, {})}

    def _taken(
        self,
        requests: Sequence[RolloutRequest],
        state: DecodeState,
        left: Sequence[tuple[int, int]],
        shorter: Mapping[int, int],
    ) -> Iterator[tuple[int, int, Taken]]:
        """Slots, who was in them, and what these have drawn, as if they were cut.

        Args:
            requests: all of them.
            state: of all slots.
            left: slots that were released, and who was in them.
            shorter: tokens that count, in the slots where not all do.
        """
        if not left:
            return
        numbers = state.tokens, state.logprobs, state.processed_logprobs, state.count
        tokens, logprobs, kept, counts = jax.device_get(numbers)
        for slot, place in left:
            begun, count = requests[place].begun, shorter.get(slot, int(counts[slot]))
            self.work.tokens += count - requests[place].num_begun
            drawn = Taken(tokens[slot, :count].copy(), logprobs[slot, :count].copy(), None, "cut")
            if kept is not None:
                drawn = replace(drawn, processed_logprobs=kept[slot, :count].copy())
            if begun is not None:
                drawn.put_before(begun)
            yield slot, place, drawn

    def _stop_strings_in(
        self,
        requests: Sequence[RolloutRequest],
        state: DecodeState,
        slots: Slots[tuple[int, Caches]],
    ) -> dict[int, int]:
        """Tokens of each rollout that a stop string has ended in the last segment, by slot."""
        if self._stop_strings is None:
            return {}
        tokens, counts = jax.device_get((state.tokens, state.count))
        found = {}
        for slot in np.flatnonzero(slots.busy).tolist():
            request = requests[slots.holders.flat[slot]]
            if request.hold:
                continue
            begun, drawn = request.begun, tokens[slot, : counts[slot]]
            if begun is not None:
                drawn = np.concatenate([begun.tokens, drawn[len(begun.tokens) :]])
            if drawn[-1] in self._vocabulary.stops:
                drawn = drawn[:-1]
            count = self._stop_strings.end(drawn, new=self._config.segment_steps)
            if count is not None:
                found[slot] = count
        return found

    def _let_in(
        self,
        requests: Sequence[RolloutRequest],
        state: DecodeState,
        slots: Slots[tuple[int, Caches]],
        weights: Weights,
    ) -> DecodeState:
        """Fills free slots, and reads as many prompts as that takes and the plan allows.

        While few decode, few have to wait: half of the slots are filled whatever that takes.
        """
        config, spent = self._config, 0
        while True:
            for (bucket, caches), given in slots.give():
                newcomers = jax.device_put(self._newcomers(requests, given), self._place)
                state = self._programs.fill[bucket](state, caches, newcomers)
            prompt = slots.next_prompt()
            if prompt is None or not slots.wants_prompts():
                return state
            bucket = config.prompt_bucket(len(prompt))
            cost = bucket * config.prefill_rows(bucket)
            most = config.plan.prefill_tokens
            if spent and spent + cost > most and slots.busy.mean() >= _FEW:
                return state
            spent += cost
            _, dealt = slots.next_prompts(config.prompt_bucket, config.prefill_rows)
            slots.wait((bucket, self._read(bucket, dealt, weights)), dealt)

    def _read(self, bucket: int, dealt: Sequence[Sequence[Group]], weights: Weights) -> Caches:
        rows = self._config.prefill_rows(bucket)
        prompts = np.full((self._shards, rows, bucket), self._vocabulary.pad, np.int32)
        lengths = np.zeros((self._shards, rows), np.int32)
        for shard, groups in enumerate(dealt):
            for row, group in enumerate(groups):
                size = len(group.prompt_tokens)
                prompts[shard, row, :size] = group.prompt_tokens
                lengths[shard, row] = size - 1
        self.work.prompt_tokens += prompts.size
        inputs = jax.device_put((prompts.reshape(-1, bucket), lengths.reshape(-1)), self._place)
        return self._programs.prefill[bucket](*weights, *inputs)

    def _held(self, requests: Sequence[RolloutRequest]) -> Held:
        steps = self._config.segment_steps
        return Held(
            {
                place: -(-(self._limit(request) - request.num_begun) // steps)
                for place, request in enumerate(requests)
                if request.hold
            }
        )

    def _limit(self, request: RolloutRequest) -> int:
        """Tokens after which it ends at the latest."""
        if request.max_new_tokens is None:
            return self._config.rollout.max_new_tokens
        return request.max_new_tokens

    def _newcomers(
        self, requests: Sequence[RolloutRequest], given: Sequence[Given]
    ) -> Newcomers[np.ndarray]:
        per_shard = self._config.slots // self._shards
        new, seen = Newcomers.none(self._config.slots), [0] * self._shards
        for one in given:
            request, first = requests[one.member], one.shard * per_shard
            at, number = first + one.slot, first + seen[one.shard]
            new.slots[number], new.rows[number] = one.slot, one.row
            seen[one.shard] += 1
            read = request.read_tokens
            new.arrived[at] = True
            new.keys[at] = request.name.key(self._config.run.seed).view(np.int32)
            new.last[at], new.length[at] = read[-1], len(read) - 1
            new.begun[at], new.limit[at] = request.num_begun, self._limit(request)
        return new
