"""The two compiled programs of a sampler: prefill a batch of prompts, decode a segment of tokens.

Both are compiled ahead of time for fixed shapes; a call with another shape is an error, never a
silent compilation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from configs.schema import Config
from pipeline.decode.cache import Caches, PromptAttention, TokenAttention
from pipeline.decode.sampling import sample
from pipeline.model.head import scaled_logits
from pipeline.model.policy import Params, Policy
from pipeline.model.sharding import build, by_row, by_row_and_head, replicated
from pipeline.model.vocabulary import Vocabulary


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heat:
    """Sampling temperature as the programs take it, so that greedy needs no program of its own.

    Attributes:
        temperature: divides the logits; log-probs are those of the scaled distribution.
        greedy: 1.0 takes the likeliest token, 0.0 draws.
    """

    temperature: Float[Array, ""]
    greedy: Float[Array, ""]

    @staticmethod
    def of(temperature: float) -> Heat:
        """Temperature 0 means greedy; its log-probs are those at temperature 1."""
        scaled, greedy = (temperature, 0.0) if temperature > 0 else (1.0, 1.0)
        # Through NumPy: `jnp.float32(x)` would compile a conversion.
        return Heat(*jax.device_put((np.float32(scaled), np.float32(greedy))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """A batch in flight.

    Attributes:
        caches: one ring cache a layer.
        last: each row's newest token, not yet in the caches.
        length: positions in each row's caches, which is the position of `last`.
        count: tokens drawn so far.
        done: rows that have ended; their further tokens mean nothing.
        keys: each row's random key.
        tokens: drawn tokens, the padding token behind each row's end.
        logprobs: their log-probs.
    """

    caches: Caches
    last: Int[Array, " batch"]
    length: Int[Array, " batch"]
    count: Int[Array, " batch"]
    done: Bool[Array, " batch"]
    keys: UInt32[Array, "batch 2"]
    tokens: Int[Array, "batch new"]
    logprobs: Float[Array, "batch new"]


@dataclass(frozen=True)
class DecodePrograms:
    """Traces prefill and segment for one policy and one configuration."""

    policy: Policy
    config: Config
    vocabulary: Vocabulary

    def prefill(
        self,
        base: Params,
        adapter: Params,
        prompts: Int[Array, "batch seq"],
        lengths: Int[Array, " batch"],
        keys: UInt32[Array, "batch 2"],
        heat: Heat,
    ) -> DecodeState:
        """Reads the prompts, draws each row's first token. Rows of length 0 are done at once."""
        batch, seq = prompts.shape
        model = self.policy.bind(base, adapter)
        positions = jnp.broadcast_to(jnp.arange(seq), (batch, seq))
        attend = PromptAttention(lengths, self.config.rollout.max_tokens)
        hidden, caches = model(prompts, positions, attend=attend)
        final = jnp.maximum(lengths - 1, 0)
        hidden = jnp.take_along_axis(hidden, final[:, None, None], axis=1)[:, 0]
        new = self.config.rollout.max_new_tokens
        rows = jnp.zeros(batch, jnp.int32)
        state = DecodeState(
            caches=caches,
            last=rows,
            length=lengths - 1,
            count=rows,
            done=lengths == 0,
            keys=keys,
            tokens=jnp.full((batch, new), self.vocabulary.pad, jnp.int32),
            logprobs=jnp.zeros((batch, new), jnp.float32),
        )
        return self._draw(base, state, hidden, heat)

    def segment(self, base: Params, adapter: Params, state: DecodeState, heat: Heat) -> DecodeState:
        """Draws up to `plan.segment_steps` further tokens a row, with the loop on the device."""

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
        self, base: Params, state: DecodeState, hidden: Float[Array, "batch embed"], heat: Heat
    ) -> DecodeState:
        """Appends one token to every row that has not ended."""
        rollout = self.config.rollout
        logits = scaled_logits(
            hidden,
            self.policy.embedding(base),
            softcap=self.policy.architecture.final_softcap,
            temperature=heat.temperature,
            forbidden=self.vocabulary.forbidden_mask(self.policy.vocab_size),
        )
        drawn, logprobs = sample(
            logits,
            state.keys,
            state.count,
            greedy=heat.greedy,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
        )
        live = ~state.done
        token = jnp.where(live, drawn, self.vocabulary.pad)
        at = jnp.minimum(state.count, rollout.max_new_tokens - 1)
        rows = jnp.arange(token.shape[0])
        count = state.count + live
        ended = jnp.isin(token, jnp.asarray(self.vocabulary.stops))
        return DecodeState(
            caches=state.caches,
            last=token,
            length=state.length + live,
            count=count,
            done=state.done | ended | (count >= rollout.max_new_tokens),
            keys=state.keys,
            tokens=state.tokens.at[rows, at].set(jnp.where(live, token, state.tokens[rows, at])),
            logprobs=state.logprobs.at[rows, at].set(
                jnp.where(live, logprobs, state.logprobs[rows, at])
            ),
        )

    def _places(self) -> Any:
        """Where each array of a `DecodeState` is."""
        mesh, model = self.policy.mesh, self.policy.architecture.config
        rows, ring = by_row(mesh), by_row_and_head(mesh, kv_heads=model.num_kv_heads)
        places = dict.fromkeys((field.name for field in fields(DecodeState)), rows)
        return DecodeState(**{**places, "caches": ((ring, ring),) * model.num_layers})

    def compile(self) -> tuple[dict[int, jax.stages.Compiled], jax.stages.Compiled]:
        """Compiled prefill by prompt bucket, and the compiled segment; allocates nothing.

        Caches are created sharded inside prefill and donated to each segment.
        """
        mesh = self.policy.mesh
        whole, rows = replicated(mesh), by_row(mesh)
        base, adapter = self.policy.abstract_params()
        scalar: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        heat = Heat(scalar, scalar)
        batch = self.config.plan.rollout_rows

        def row_shape(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch, *shape), dtype, sharding=rows)

        keys = row_shape(2, dtype=jnp.uint32)
        places = self._places()
        prefill = jax.jit(self.prefill, out_shardings=places)
        prefills = {
            bucket: prefill.trace(base, adapter, row_shape(bucket), row_shape(), keys, heat)
            for bucket in self.config.prompt_buckets
        }
        state = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            next(iter(prefills.values())).out_info,
            places,
        )
        segment = jax.jit(self.segment, donate_argnums=2, out_shardings=places)
        return (
            {bucket: build(traced, mesh) for bucket, traced in prefills.items()},
            build(segment.trace(base, adapter, state, heat), mesh),
        )
