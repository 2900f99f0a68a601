"""The rollout engine: named requests in, completions out, in batches of a fixed shape.

Requests are cut into batches in the order given. Within a compiled shape a rollout does not depend
on its row or its neighbours, so what is drawn is a function of names, adapter and shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import jax
import numpy as np

from configs.schema import Config
from pipeline.datatypes import Completion, RolloutRequest, StopReason
from pipeline.decode.programs import DecodePrograms, DecodeState, Heat
from pipeline.model.policy import Params, Policy
from pipeline.model.sharding import by_row
from pipeline.model.vocabulary import Vocabulary


class Aborted(Exception):  # noqa: N818  # not an error: somebody asked for it
    """Generation was told to stop; what was in flight is lost."""


class Engine:
    """Compiled programs and the loop around them. Compiles once, when it is made.

    Args:
        policy: the model.
        base: its frozen parameters, shared, never copied.
        config: shapes, lengths, temperature and seed.
        vocabulary: token ids with a meaning.
    """

    def __init__(
        self, policy: Policy, base: Params, config: Config, vocabulary: Vocabulary
    ) -> None:
        self._base = base
        self._config = config
        self._vocabulary = vocabulary
        self._place = by_row(policy.mesh)
        self._prefills, self._segment = DecodePrograms(policy, config, vocabulary).compile()
        self._abort = threading.Event()

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        adapter: Params,
        version: int,
        adapter_sha256: str,
        temperature: float,
    ) -> list[Completion]:
        """Draws one completion for each request, in their order.

        Args:
            requests: prompts of at most `rollout.max_prompt_tokens` tokens.
            adapter: on this policy's mesh.
            version: written on every completion.
            adapter_sha256: likewise.
            temperature: 0 is greedy.

        Raises:
            Aborted: if `abort` was called, also before; noticed between two segments.
        """
        rows = self._config.plan.rollout_rows
        heat = Heat.of(temperature)
        completions: list[Completion] = []
        for start in range(0, len(requests), rows):
            batch = requests[start : start + rows]
            state = self._run(batch, adapter, heat)
            completions += self._completions(batch, state, version, adapter_sha256)
        return completions

    def abort(self) -> None:
        """Makes `generate` raise `Aborted` at its next look, for good; safe from other threads."""
        self._abort.set()

    def _run(self, batch: Sequence[RolloutRequest], adapter: Params, heat: Heat) -> DecodeState:
        longest = max(len(request.prompt_tokens) for request in batch)
        bucket = min(size for size in self._prefills if size >= longest)
        rows = self._config.plan.rollout_rows
        prompts = np.full((rows, bucket), self._vocabulary.pad, np.int32)
        lengths = np.zeros(rows, np.int32)
        keys = np.zeros((rows, 2), np.uint32)
        for row, request in enumerate(batch):
            lengths[row] = len(request.prompt_tokens)
            prompts[row, : lengths[row]] = request.prompt_tokens
            keys[row] = request.name.key(self._config.run.seed)
        inputs = jax.device_put((prompts, lengths, keys), self._place)
        state = self._prefills[bucket](self._base, adapter, *inputs, heat)
        while not np.asarray(state.done).all():
            if self._abort.is_set():
                raise Aborted
            state = self._segment(self._base, adapter, state, heat)
        return state

    def _completions(
        self, batch: Sequence[RolloutRequest], state: DecodeState, version: int, sha: str
    ) -> list[Completion]:
        tokens, logprobs, counts = jax.device_get((state.tokens, state.logprobs, state.count))
        completions = []
        for row, request in enumerate(batch):
            drawn = tokens[row, : counts[row]]
            reason: StopReason = "eos" if drawn[-1] in self._vocabulary.stops else "length"
            completions.append(
                Completion(
                    name=request.name,
                    prompt_tokens=request.prompt_tokens,
                    tokens=drawn.copy(),
                    logprobs=logprobs[row, : counts[row]].copy(),
                    stop_reason=reason,
                    version=version,
                    adapter_sha256=sha,
                )
            )
        return completions
