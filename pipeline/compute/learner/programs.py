"""The learner's compiled programs: score tokens, add up a gradient, apply an update.

Compiled ahead of time, one of each for every size of a micro-batch, of which there are at most two.
The gradient program borrows the adapter; only the small program that applies the update takes
adapter and optimizer state for good, so that running out of memory in the large one cannot lose
them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from configs.schema import Config
from pipeline.compute.learner.batches import DemonstrationBatch, DeviceBatch, Inputs, Kept
from pipeline.compute.learner.losses import weighted_sum
from pipeline.compute.learner.objective import asked_for, objective
from pipeline.compute.learner.optimizer import grpo_rate, imitation_rate, make_optimizer
from pipeline.compute.learner.topk import keep
from pipeline.compute.model.attention import PackedAttention
from pipeline.compute.model.building import Builder, results
from pipeline.compute.model.flash import FlashAttention
from pipeline.compute.model.footprint import program_bytes
from pipeline.compute.model.head import Head, Scores, score
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.remat import Remat
from pipeline.compute.model.sharding import by_row, replicated
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.batches import BatchShape
from pipeline.contracts.builds import BuildLog
from pipeline.inputs.dataset.batching import batch_shape

Scalars = dict[str, Float[Array, ""]]
BySize = dict[int, jax.stages.Compiled]
"""A program for each size of a micro-batch, by its rows."""
FutureBySize = dict[int, Future[jax.stages.Compiled]]
"""The same while they are compiled."""

IMITATION_TEMPERATURE = 1.0
"""Worked examples are learned at the model's own temperature, whatever rollouts are drawn at."""

ABOUT_UPDATE = ("loss", "policy_loss", "grad_norm", "lr", "skipped_updates")
"""Metrics of an update as a whole; all others describe tokens, and their mean is told."""


@dataclass(frozen=True)
class CompiledPrograms:
    """What `LearnerPrograms.compile` returns.

    `keep` is there only where the top of a distribution is kept, `imitation` and `apply_imitation`
    only in runs with a supervised phase. `apply` takes adapter, optimizer state, gradient and loss,
    and the learning rate, too, where the clock plans it.
    """

    score: BySize
    keep: BySize
    gradient: BySize
    apply: jax.stages.Compiled
    imitation: BySize
    apply_imitation: jax.stages.Compiled | None

    def needs(self, weights: int) -> dict[str, dict[str, int]]:
        """Bytes of each device beside base and adapter while a program runs.

        By what it is for, "score" or "update", and by its name. The one that applies an update
        takes optimizer state in place and less than a gradient; it is left out.

        Args:
            weights: bytes of each device that base and adapter take.
        """
        named = {
            "score": {"score": self.score},
            "update": {
                "score": self.score,
                "keep": self.keep,
                "gradient": self.gradient,
                "imitation": self.imitation,
            },
        }
        return {
            phase: {
                f"{name} {size}": program_bytes(program) - weights
                for name, programs in by_name.items()
                for size, program in programs.items()
            }
            for phase, by_name in named.items()
        }


@dataclass(frozen=True)
class LearnerPrograms:
    """Traces the programs for one policy and one configuration.

    Raises:
        ValueError: if more of the likeliest tokens are to be kept than can be drawn.
    """

    policy: Policy
    config: Config
    vocabulary: Vocabulary

    def __post_init__(self) -> None:
        """Checks what only the vocabulary tells."""
        settings = self.config.learner
        drawable = self.policy.vocab_size - len(set(self.vocabulary.forbidden))
        if settings.uses_reference_top_k and settings.kl_top_k > drawable:
            raise ValueError(
                f"learner.kl_top_k = {settings.kl_top_k}: only {drawable} tokens of the vocabulary "
                f"may be drawn; nearest valid: {drawable}"
            )

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of the GRPO phase."""
        return make_optimizer(self.config, grpo_rate(self.config))

    @property
    def imitation_optimizer(self) -> optax.GradientTransformation:
        """The optimizer of the supervised phase; its state is shaped like the other's."""
        return make_optimizer(self.config, imitation_rate(self.config))

    @property
    def shape(self) -> BatchShape:
        """The sizes of micro-batches."""
        return batch_shape(self.config, pad=self.vocabulary.pad)

    def score(self, base: Params, adapter: Params, inputs: Inputs) -> Float[Array, "rows seq"]:
        """Log-prob of each target at the rollout temperature."""
        return self._scores(base, adapter, inputs).logprobs

    def keep(self, base: Params, adapter: Params, inputs: Inputs) -> Kept:
        """The likeliest next tokens at each position at the rollout temperature."""
        settings = self.config.learner
        top = self._scores(base, adapter, inputs, top_k=settings.kl_top_k).top
        assert top is not None
        return keep(top, dtype=settings.top_k_dtype)

    def gradient(
        self, base: Params, adapter: Params, total: Params, batch: DeviceBatch
    ) -> tuple[Params, Scalars, Float[Array, "rows seq"]]:
        """Adds the batch's gradient to `total`.

        Returns:
            The new total, the batch's share of the metrics, and the log-prob of each target.
        """

        def loss(adapter: Params) -> tuple[Float[Array, ""], tuple[Scalars, Array]]:
            scores = self._scores(base, adapter, batch.inputs, picks=asked_for(batch), remat=True)
            values, about = objective(scores, batch, settings=self.config.learner)
            shares = {name: weighted_sum(value, batch.weights) for name, value in about.items()}
            return weighted_sum(values, batch.weights), (shares, scores.logprobs)

        (value, (shares, logprobs)), grads = jax.value_and_grad(loss, has_aux=True)(adapter)
        total = jax.tree.map(jnp.add, total, grads)
        return total, {"loss": value, **shares}, logprobs

    def imitation(
        self, base: Params, adapter: Params, total: Params, batch: DemonstrationBatch
    ) -> tuple[Params, Scalars]:
        """Adds the gradient of the examples' negative log-likelihood to `total`.

        Returns:
            The new total and the batch's share of the loss, in nats a token.
        """

        def loss(adapter: Params) -> Float[Array, ""]:
            scores = self._scores(
                base, adapter, batch.inputs, temperature=IMITATION_TEMPERATURE, remat=True
            )
            return weighted_sum(-scores.logprobs, batch.weights)

        value, grads = jax.value_and_grad(loss)(adapter)
        return jax.tree.map(jnp.add, total, grads), {"loss": value}

    def apply(
        self, adapter: Params, state: optax.OptState, grads: Params, loss: Float[Array, ""]
    ) -> tuple[Params, optax.OptState, Float[Array, ""]]:
        """One GRPO update, or none if the loss or the gradient's norm is infinite or NaN.

        Returns:
            Adapter, optimizer state and the gradient's norm before clipping.
        """
        return _apply(self.optimizer, adapter, state, grads, loss)

    def apply_planned(
        self,
        adapter: Params,
        state: optax.OptState,
        grads: Params,
        loss: Float[Array, ""],
        rate: Float[Array, ""],
    ) -> tuple[Params, optax.OptState, Float[Array, ""]]:
        """The same at a learning rate that is given: the plan may change, the program does not."""
        optimizer = make_optimizer(self.config, lambda _: rate)
        return _apply(optimizer, adapter, state, grads, loss)

    def apply_imitation(
        self, adapter: Params, state: optax.OptState, grads: Params, loss: Float[Array, ""]
    ) -> tuple[Params, optax.OptState, Float[Array, ""]]:
        """One supervised update; likewise."""
        return _apply(self.imitation_optimizer, adapter, state, grads, loss)

    def _scores(
        self,
        base: Params,
        adapter: Params,
        inputs: Inputs,
        *,
        temperature: float | None = None,
        picks: Int[Array, "rows seq k"] | None = None,
        top_k: int = 0,
        remat: bool = False,
    ) -> Scores:
        plan, mesh = self.config.plan, self.policy.mesh
        # With a gradient each layer casts the adapter, without one it is cast once.
        hidden, _ = self.policy.bind(base, adapter, exact=remat)(
            inputs.tokens,
            inputs.positions,
            attend=PackedAttention(
                inputs.segments, flash=FlashAttention(mesh) if plan.attention == "splash" else None
            ),
            remat=Remat(plan.remat, plan.layer_tokens) if remat else None,
        )
        head = Head(
            softcap=self.policy.architecture.final_softcap,
            temperature=temperature or self.config.rollout.temperature,
            tokens=plan.head_tokens,
            vocab=plan.head_vocab,
            mesh=mesh,
        )
        return score(
            hidden,
            inputs.targets,
            self.policy.embedding(base),
            head=head,
            forbidden=self.vocabulary.forbidden_mask(self.policy.vocab_size),
            picks=picks,
            top_k=top_k,
        )

    def compile(self, log: BuildLog | None = None) -> CompiledPrograms:
        """Compiles everything for the configured shapes, several at a time; allocates nothing.

        Args:
            log: told about each program.
        """
        with Builder(self.policy.mesh, log=log) as builder:
            # Those that take longest are asked for first.
            gradient = self._by_size("gradient", self.trace_gradient, builder)
            imitation, keep, apply_imitation = {}, {}, None
            if self.config.run.has_sft_phase:
                imitation = self._by_size("imitation", self.trace_imitation, builder)
            if self.config.learner.uses_reference_top_k:
                keep = self._by_size("keep", self.trace_keep, builder)
            score = self._by_size("score", self.trace_score, builder)
            apply = builder.build("apply", self.trace_apply())
            if self.config.run.has_sft_phase:
                traced = self._trace_apply(self.apply_imitation)
                apply_imitation = builder.build("apply imitation", traced)
            return CompiledPrograms(
                score=results(score),
                keep=results(keep),
                gradient=results(gradient),
                apply=apply.result(),
                imitation=results(imitation),
                apply_imitation=None if apply_imitation is None else apply_imitation.result(),
            )

    def compile_score(self) -> BySize:
        """The scoring program alone."""
        with Builder(self.policy.mesh) as builder:
            return results(self._by_size("score", self.trace_score, builder))

    def trace_score(self, rows: int) -> jax.stages.Traced:
        """The program of `score`, for so many rows."""
        return self._trace_forward(self.score, rows)

    def trace_keep(self, rows: int) -> jax.stages.Traced:
        """The program of `keep`, for so many rows."""
        return self._trace_forward(self.keep, rows)

    def trace_gradient(self, rows: int) -> jax.stages.Traced:
        """The program of `gradient`, for so many rows."""
        whole, by_rows = replicated(self.policy.mesh), by_row(self.policy.mesh)
        base, adapter = self.policy.abstract_params()
        places = (whole, whole, by_rows)
        program = jax.jit(self.gradient, donate_argnums=2, out_shardings=places)
        return program.trace(base, adapter, adapter, self.abstract_batch(rows))

    def trace_imitation(self, rows: int) -> jax.stages.Traced:
        """The program of `imitation`, for so many rows."""
        base, adapter = self.policy.abstract_params()
        whole = replicated(self.policy.mesh)
        program = jax.jit(self.imitation, donate_argnums=2, out_shardings=whole)
        examples = DemonstrationBatch(self.abstract_inputs(rows), self._rows(rows))
        return program.trace(base, adapter, adapter, examples)

    def trace_apply(self) -> jax.stages.Traced:
        """The program of `apply`."""
        return self._trace_apply(self.apply_planned if self.config.plans_decay else self.apply)

    def _trace_apply(self, function: Any) -> jax.stages.Traced:
        whole = replicated(self.policy.mesh)
        _, adapter = self.policy.abstract_params()
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
            jax.eval_shape(self.optimizer.init, adapter),
        )
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        given = [scalar, scalar] if function == self.apply_planned else [scalar]
        program = jax.jit(function, donate_argnums=(0, 1), out_shardings=whole)
        return program.trace(adapter, state, adapter, *given)

    def _trace_forward(self, function: Any, rows: int) -> jax.stages.Traced:
        base, adapter = self.policy.abstract_params()
        program = jax.jit(function, out_shardings=by_row(self.policy.mesh))
        return program.trace(base, adapter, self.abstract_inputs(rows))

    def _by_size(
        self, name: str, trace: Callable[[int], jax.stages.Traced], builder: Builder
    ) -> FutureBySize:
        sizes = self.shape.sizes
        return {size: builder.build(f"{name} {size}", trace(size)) for size in sizes}

    @property
    def keeps_old(self) -> bool:
        """Whether old log-probs are kept: not while every batch is used once."""
        return self.config.learner.updates_per_batch > 1

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference must be asked about the tokens."""
        return self.config.learner.kl_coef > 0

    @property
    def learns_without_advantage(self) -> bool:
        """Whether there is a term that also pulls on rollouts whose advantage is 0."""
        return self.keeps_reference or self.config.learner.teacher is not None

    def abstract_inputs(self, rows: int) -> Inputs:
        """`Inputs` as shapes, for compiling ahead of time."""
        ints = self._rows(rows, dtype=jnp.int32)
        return Inputs(ints, ints, ints, ints)

    def abstract_batch(self, rows: int) -> DeviceBatch:
        """`DeviceBatch` as shapes, for compiling ahead of time."""
        settings, floats = self.config.learner, self._rows(rows)
        k, kept = settings.kl_top_k, None
        if settings.uses_reference_top_k:
            kept = Kept(
                logprobs=self._rows(rows, k, dtype=settings.top_k_dtype),
                tokens=self._rows(rows, k, dtype=jnp.int32),
                tail=floats,
            )
        over_top = settings.kl == "topk"
        return DeviceBatch(
            inputs=self.abstract_inputs(rows),
            weights=floats,
            advantages=floats,
            processed_logprobs=floats if settings.importance_cap else None,
            old_logprobs=floats if self.keeps_old else None,
            reference_logprobs=floats if self.keeps_reference and not over_top else None,
            reference=kept if self.keeps_reference and over_top else None,
            teacher=kept if settings.teacher is not None else None,
        )

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
    # A finite norm is the root of a finite sum of squares, which Adam averages. The selection is
    # made here, because the memory of what is given is taken for what is returned.
    made = jnp.isfinite(loss) & jnp.isfinite(norm)
    adapter, state = jax.tree.map(
        lambda new, old: jnp.where(made, new, old),
        (optax.apply_updates(adapter, updates), updated),
        (adapter, state),
    )
    return adapter, state, norm
