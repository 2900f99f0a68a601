"""The learner's compiled programs: score tokens, accumulate a gradient, apply an update.

Compiled ahead of time, one of each for every size of a micro-batch, of which there are at most two.
The gradient program does not donate the adapter; only the small program that applies the update
donates adapter and optimizer state, so that running out of memory in the large one cannot lose
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from configs.plan import HEAD_TOKENS, HEAD_VOCAB, LAYER_TOKENS
from configs.schema import Config
from pipeline.compute.builds import BuildLog
from pipeline.compute.learner.batches import DeviceBatch, Inputs, TopKLogprobs
from pipeline.compute.learner.losses import learned_max, weighted_sum
from pipeline.compute.learner.objective import gather_tokens, objective
from pipeline.compute.learner.optimizer import grpo_rate, make_optimizer, sft_rate
from pipeline.compute.learner.topk import top_k_logprobs
from pipeline.compute.model import lora
from pipeline.compute.model.attention import FlashAttention, PackedAttention
from pipeline.compute.model.building import Trace, build_all
from pipeline.compute.model.head import Head
from pipeline.compute.model.head_score import Scores, in_blocks, score
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.remat import Remat
from pipeline.compute.model.sharding import FSDP, batch_shards, by_row, replicated
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.data.batching import Packing, batch_shape
from pipeline.data.packed_batch import BatchShape
from pipeline.plan.lengths import Lengths

Scalars = dict[str, Float[Array, ""]]
Compiled = dict[str, jax.stages.Compiled]
"""Programs by name, such as `gradient 8`: a kind and the rows of a micro-batch. Those that apply an
update have no size."""

SFT_TEMPERATURE = 1.0
"""Temperature of the demonstrations' log-probs, independent of the rollout temperature."""

_SUMS = ("loss", "policy_loss")
_MAXIMA = ("ratio_max",)


def combined(shares: Sequence[Mapping[str, float]], *, weight: float) -> dict[str, float]:
    """The metrics of an update from those of its micro-batches.

    The losses are sums over the whole step and `ratio_max` is a maximum; all others are means over
    learned tokens.

    Args:
        shares: contribution of each micro-batch, from `gradient`.
        weight: sum of the loss weights of all tokens.
    """
    found = {}
    for name in shares[0]:
        values = [float(share[name]) for share in shares]
        # NumPy's maximum, not Python's, which may pass over a NaN.
        total = float(np.max(values)) if name in _MAXIMA else sum(values)
        found[name] = total if name in (*_SUMS, *_MAXIMA) else total / weight
    return found


@dataclass(frozen=True)
class LearnerPrograms:
    """Traces and compiles the programs for one policy and one configuration.

    Raises:
        ValueError: if `learner.kl_top_k` exceeds the number of allowed tokens.
    """

    policy: Policy
    config: Config
    vocabulary: Vocabulary

    def __post_init__(self) -> None:
        """Checks settings against the vocabulary."""
        settings = self.config.learner
        allowed = self.policy.vocab_size - len(set(self.vocabulary.forbidden))
        if settings.uses_reference_top_k and settings.kl_top_k > allowed:
            raise ValueError(
                f"learner.kl_top_k = {settings.kl_top_k}: only {allowed} tokens of the vocabulary "
                f"are allowed; nearest valid: {allowed}"
            )

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer; its state has the same structure in both phases, whatever the rate."""
        return make_optimizer(self.config, grpo_rate(self.config))

    @property
    def shape(self) -> BatchShape:
        """Sizes of micro-batches."""
        return batch_shape(self.config, pad=self.vocabulary.pad)

    def score(self, base: Params, adapter: Params, inputs: Inputs) -> Float[Array, "rows seq"]:
        """Log-prob of each learned target at the rollout temperature; 0 elsewhere."""
        return self._scores(base, adapter, inputs).logprobs

    def reference_top_k(self, base: Params, adapter: Params, inputs: Inputs) -> TopKLogprobs:
        """The top k of each learned position at the rollout temperature; 0 elsewhere."""
        top = self._scores(base, adapter, inputs, top_k=self.config.learner.kl_top_k).top
        assert top is not None
        return top_k_logprobs(top)

    def gradient(
        self, base: Params, adapter: Params, total: Params, batch: DeviceBatch
    ) -> tuple[Params, Scalars, Float[Array, "rows seq"]]:
        """Adds the batch's gradient to `total`.

        Returns:
            The new total, the batch's contribution to the metrics, and the log-prob of each learned
            target, 0 elsewhere.
        """

        def loss(adapter: Params) -> tuple[Float[Array, ""], tuple[Scalars, Array]]:
            further = gather_tokens(batch)
            scores = self._scores(base, adapter, batch.inputs, further=further, remat=True)
            values, metrics = objective(scores, batch, settings=self.config.learner)
            weights = batch.inputs.weights
            shares = {
                name: (learned_max if name in _MAXIMA else weighted_sum)(value, weights)
                for name, value in metrics.items()
            }
            return weighted_sum(values, weights), (shares, scores.logprobs)

        (value, (shares, logprobs)), grads = jax.value_and_grad(loss, has_aux=True)(adapter)
        total = jax.tree.map(jnp.add, total, grads)
        return total, {"loss": value, **shares}, logprobs

    def sft_gradient(
        self, base: Params, adapter: Params, total: Params, inputs: Inputs
    ) -> tuple[Params, Scalars]:
        """Adds the gradient of the demonstrations' negative log-likelihood to `total`.

        Returns:
            The new total and the batch's contribution to the loss, in nats per token.
        """

        def loss(adapter: Params) -> Float[Array, ""]:
            scores = self._scores(base, adapter, inputs, temperature=SFT_TEMPERATURE, remat=True)
            return weighted_sum(-scores.logprobs, inputs.weights)

        value, grads = jax.value_and_grad(loss)(adapter)
        return jax.tree.map(jnp.add, total, grads), {"loss": value}

    def _scores(
        self,
        base: Params,
        adapter: Params,
        inputs: Inputs,
        *,
        temperature: float | None = None,
        further: Int[Array, "rows seq k"] | None = None,
        top_k: int = 0,
        remat: bool = False,
    ) -> Scores:
        # With a gradient each layer casts the adapter; without one it is cast once.
        hidden, _ = self.policy.bind(base, adapter, exact=remat)(
            inputs.tokens,
            inputs.positions,
            attend=self.attention(inputs),
            remat=Remat(self.config.plan.remat, LAYER_TOKENS) if remat else None,
        )
        return score(
            hidden,
            inputs.targets,
            self.policy.embedding(base),
            head=self._head(temperature or self.config.rollout.temperature),
            forbidden=self.vocabulary.forbidden_mask(self.policy.vocab_size),
            learned=inputs.learned,
            gather_tokens=further,
            top_k=top_k,
        )

    def attention(self, inputs: Inputs) -> PackedAttention:
        """The attention of these rows."""
        flash = FlashAttention(self.policy.mesh) if self.config.plan.uses_splash else None
        if inputs.prefixes is None:
            return PackedAttention(inputs.layout, flash=flash)
        rollout = self.config.rollout
        return PackedAttention(
            inputs.layout,
            flash=flash,
            prompt=rollout.max_prompt_tokens,
            completion=rollout.max_new_tokens,
        )

    def _head(self, temperature: float) -> Head:
        softcap = self.policy.architecture.shape.final_softcap
        return Head(softcap, temperature, HEAD_TOKENS, HEAD_VOCAB, self.policy.mesh)

    def expected_blocks(self, kind: str, rows: int) -> float:
        """Expected trip count of the head's loop over learned positions, at the assumed lengths."""
        positions = rows * self.config.row_tokens // batch_shards(self.policy.mesh)
        top_k = self.config.learner.kl_top_k if kind == "reference_top_k" else 0
        block = in_blocks(self._head(1.0), positions, top_k=top_k).tokens
        size = max(1, block // self.policy.mesh.shape[FSDP])
        share = Packing.expected(self.config, Lengths.expected(self.config)).learned
        return min(-(-positions // size), share * positions / size + 0.5)

    def compile(self, log: BuildLog | None = None) -> Compiled:
        """Compiles all programs, several at a time; `log` receives an entry for each."""
        return build_all(self.programs, self.policy.mesh, log=log)

    def compile_score(self) -> Compiled:
        """Compiles the scoring program alone."""
        return build_all(self._by_size("score", self.trace_score), self.policy.mesh)

    @property
    def programs(self) -> dict[str, Trace]:
        """What `compile` compiles, by name, the slowest compilations first."""
        has_sft_phase = self.config.run.has_sft_phase
        found = self._by_size("gradient", self.trace_gradient)
        if has_sft_phase:
            found |= self._by_size("sft_gradient", self.trace_sft_gradient)
        if self.config.learner.uses_reference_top_k:
            found |= self._by_size("reference_top_k", self.trace_reference_top_k)
        found |= self._by_size("score", self.trace_score)
        found["apply"] = self.trace_apply
        if has_sft_phase:
            found["apply_sft"] = self.trace_apply_sft
        return found

    def trace_score(self, rows: int) -> jax.stages.Traced:
        """Traces `score` for micro-batches of `rows`."""
        return self._trace_forward(self.score, rows)

    def trace_reference_top_k(self, rows: int) -> jax.stages.Traced:
        """Traces `reference_top_k` for micro-batches of `rows`."""
        return self._trace_forward(self.reference_top_k, rows)

    def trace_gradient(self, rows: int) -> jax.stages.Traced:
        """Traces `gradient` for micro-batches of `rows`."""
        whole, by_rows = replicated(self.policy.mesh), by_row(self.policy.mesh)
        base, adapter = self.policy.abstract_params()
        places = (whole, whole, by_rows)
        program = self.policy.jit(self.gradient, donate_argnums=2, out_shardings=places)
        return program.trace(base, adapter, adapter, self.abstract_batch(rows))

    def trace_sft_gradient(self, rows: int) -> jax.stages.Traced:
        """Traces `sft_gradient` for micro-batches of `rows`."""
        base, adapter = self.policy.abstract_params()
        whole = replicated(self.policy.mesh)
        program = self.policy.jit(self.sft_gradient, donate_argnums=2, out_shardings=whole)
        inputs = self.abstract_inputs(rows, share_prefix=False)
        return program.trace(base, adapter, adapter, inputs)

    def trace_apply(self) -> jax.stages.Traced:
        """Traces a GRPO update, of adapter, optimizer state, gradient, loss and learning rate.

        It takes the learning rate, so that neither a new plan of the decay nor a new peak compiles.
        """
        return self._trace_apply(None)

    def trace_apply_sft(self) -> jax.stages.Traced:
        """Traces an SFT update."""
        return self._trace_apply(sft_rate(self.config))

    def _trace_apply(self, schedule: optax.Schedule | None) -> jax.stages.Traced:
        """Traces one update.

        The learning rate follows the schedule, or is an argument if there is none.

        It changes nothing if the loss or the gradient's norm is infinite or NaN. Its results are
        adapter, optimizer state, and the norms of the gradient before clipping (`grad_norm`) and
        of the resulting adapter (`lora.norms`).
        """
        whole = replicated(self.policy.mesh)
        _, adapter = self.policy.abstract_params()
        any_rate = make_optimizer(self.config, lambda _: 0.0)
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
            jax.eval_shape(any_rate.init, adapter),
        )

        def apply(adapter: Params, state: Any, grads: Params, loss: Any, *rate: Any) -> Any:
            optimizer = make_optimizer(self.config, schedule or (lambda _: rate[0]))
            adapter, state, norm = _apply(optimizer, adapter, state, grads, loss)
            layers = self.policy.architecture.shape.layers
            norms = lora.norms(adapter, lora=self.config.lora, layers=layers)
            return adapter, state, {"grad_norm": norm, **norms}

        given = [self._scalar] if schedule else [self._scalar, self._scalar]
        program = self.policy.jit(apply, donate_argnums=(0, 1), out_shardings=whole)
        return program.trace(adapter, state, adapter, *given)

    def _trace_forward(self, function: Any, rows: int) -> jax.stages.Traced:
        base, adapter = self.policy.abstract_params()
        program = self.policy.jit(function, out_shardings=by_row(self.policy.mesh))
        inputs = self.abstract_inputs(rows, share_prefix=self.shape.share_prefix)
        return program.trace(base, adapter, inputs)

    def _by_size(self, kind: str, trace: Callable[[int], jax.stages.Traced]) -> dict[str, Trace]:
        return {f"{kind} {size}": partial(trace, size) for size in self.shape.sizes}

    @property
    def uses_old_logprobs(self) -> bool:
        """Whether old log-probs are stored: only if a batch is used for several updates."""
        return self.config.learner.updates_per_batch > 1

    @property
    def uses_reference(self) -> bool:
        """Whether the loss has a KL term."""
        return self.config.learner.kl_coef > 0

    @property
    def learns_without_advantage(self) -> bool:
        """Whether the loss has a term that affects rollouts with advantage 0."""
        return self.uses_reference or self.config.learner.teacher is not None

    def abstract_inputs(self, rows: int, *, share_prefix: bool) -> Inputs:
        """Shapes of `Inputs`, for compiling ahead of time."""
        ints = self._rows(rows, dtype=jnp.int32)
        prefixes = ints if share_prefix else None
        return Inputs(ints, ints, self._rows(rows), ints, ints, prefixes)

    def abstract_batch(self, rows: int) -> DeviceBatch:
        """Shapes of `DeviceBatch`, for compiling ahead of time."""
        settings, floats = self.config.learner, self._rows(rows)
        k, top = settings.kl_top_k, None
        if settings.uses_reference_top_k:
            top = TopKLogprobs(
                logprobs=self._rows(rows, k),
                tokens=self._rows(rows, k, dtype=jnp.int32),
                tail=floats,
            )
        top_k_kl = settings.kl == "topk"
        return DeviceBatch(
            inputs=self.abstract_inputs(rows, share_prefix=self.shape.share_prefix),
            advantages=floats,
            processed_logprobs=floats if settings.importance_cap else None,
            old_logprobs=floats if self.uses_old_logprobs else None,
            reference_logprobs=floats if self.uses_reference and not top_k_kl else None,
            reference=top if self.uses_reference and top_k_kl else None,
            kl_coef=self._scalar if self.uses_reference else None,
            teacher=top if settings.teacher is not None else None,
        )

    @property
    def _scalar(self) -> Any:
        return jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated(self.policy.mesh))

    def _rows(self, rows: int, *more: int, dtype: Any = jnp.float32) -> Any:
        shape = (rows, self.config.row_tokens, *more)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=by_row(self.policy.mesh))


def _apply(
    optimizer: optax.GradientTransformation,
    adapter: Params,
    state: optax.OptState,
    grads: Params,
    loss: Float[Array, ""],
) -> tuple[Params, optax.OptState, Float[Array, ""]]:
    norm = optax.tree.norm(grads)
    updates, updated = optimizer.update(grads, state, adapter)
    # A finite norm means a finite sum of squares, so Adam's moments stay finite. The selection is
    # inside the program because the arguments are donated.
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    adapter, state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (optax.apply_updates(adapter, updates), updated),
        (adapter, state),
    )
    return adapter, state, norm
