"""The learner's compiled programs: score tokens, add up a gradient, apply an update.

Compiled ahead of time, one of each per sequence bucket. The gradient program borrows the adapter;
only the small program that applies the update takes adapter and optimizer state for good, so that
running out of memory in the large one cannot lose them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from configs.schema import Config
from pipeline.learner.losses import clipped_policy_loss, kl_k3, weighted_sum
from pipeline.learner.optimizer import grpo_rate, imitation_rate, make_optimizer
from pipeline.model.attention import PackedAttention
from pipeline.model.head import token_logprobs
from pipeline.model.policy import Params, Policy
from pipeline.model.sharding import build, by_row, replicated, rows_per_device
from pipeline.model.vocabulary import Vocabulary

Scalars = dict[str, Float[Array, ""]]

IMITATION_TEMPERATURE = 1.0
"""Worked examples are learned at the model's own temperature, whatever rollouts are drawn at."""

PER_TOKEN = ("clip_fraction", "entropy", "kl")
"""Metrics of the gradient program that describe tokens rather than add up to the loss."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceBatch:
    """A `TokenBatch` on the devices, with what its tokens scored under other policies.

    Attributes:
        tokens: inputs.
        targets: the next token of each input.
        weights: of each target in the loss.
        advantages: of the rollout in each row.
        old_logprobs: under the policy that drew them; None: the current one is that policy.
        reference_logprobs: under the base; None where no KL is asked for.
    """

    tokens: Int[Array, "batch seq"]
    targets: Int[Array, "batch seq"]
    weights: Float[Array, "batch seq"]
    advantages: Float[Array, " batch"]
    old_logprobs: Float[Array, "batch seq"] | None
    reference_logprobs: Float[Array, "batch seq"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExampleBatch:
    """A `PackedBatch` on the devices; see there."""

    tokens: Int[Array, "batch seq"]
    targets: Int[Array, "batch seq"]
    weights: Float[Array, "batch seq"]
    segments: Int[Array, "batch seq"]
    positions: Int[Array, "batch seq"]


@dataclass(frozen=True)
class CompiledPrograms:
    """What `LearnerPrograms.compile` returns; score and gradient by sequence length.

    `imitation` and `apply_imitation` are there only in runs with a supervised phase.
    """

    score: dict[int, jax.stages.Compiled]
    gradient: dict[int, jax.stages.Compiled]
    apply: jax.stages.Compiled
    imitation: jax.stages.Compiled | None
    apply_imitation: jax.stages.Compiled | None


@dataclass(frozen=True)
class LearnerPrograms:
    """Traces the programs for one policy and one configuration."""

    policy: Policy
    config: Config
    vocabulary: Vocabulary

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of the GRPO phase."""
        return make_optimizer(self.config, grpo_rate(self.config))

    @property
    def imitation_optimizer(self) -> optax.GradientTransformation:
        """The optimizer of the supervised phase; its state is shaped like the other's."""
        return make_optimizer(self.config, imitation_rate(self.config))

    def score(
        self,
        base: Params,
        adapter: Params,
        tokens: Int[Array, "batch seq"],
        targets: Int[Array, "batch seq"],
    ) -> Float[Array, "batch seq"]:
        """Log-prob of each target at the rollout temperature."""
        return self._logprobs(base, adapter, tokens, targets, remat=False)[0]

    def gradient(
        self, base: Params, adapter: Params, total: Params, batch: DeviceBatch
    ) -> tuple[Params, Scalars, Float[Array, "batch seq"]]:
        """Adds the batch's gradient to `total`.

        Returns:
            The new total, the batch's share of the metrics, and the log-prob of each target.
        """

        def loss(adapter: Params) -> tuple[Float[Array, ""], tuple[Scalars, Array]]:
            logprobs, entropy = self._logprobs(
                base, adapter, batch.tokens, batch.targets, remat=self.config.plan.remat
            )
            # Elsewhere may stand anything, and an infinite ratio there would be a NaN in the
            # gradient.
            learned = batch.weights > 0
            scored = jnp.where(learned, logprobs, 0.0)
            old = batch.old_logprobs
            policy_loss, clipped = clipped_policy_loss(
                scored,
                jax.lax.stop_gradient(scored) if old is None else jnp.where(learned, old, 0.0),
                batch.advantages,
                epsilon=self.config.learner.clip_epsilon,
            )
            per_token = {"policy_loss": policy_loss, "clip_fraction": clipped, "entropy": entropy}
            objective = policy_loss
            if batch.reference_logprobs is not None:
                reference = jnp.where(learned, batch.reference_logprobs, 0.0)
                per_token["kl"] = kl_k3(scored, reference)
                objective += self.config.learner.kl_coef * per_token["kl"]
            shares = {name: weighted_sum(value, batch.weights) for name, value in per_token.items()}
            return weighted_sum(objective, batch.weights), (shares, logprobs)

        (value, (shares, logprobs)), grads = jax.value_and_grad(loss, has_aux=True)(adapter)
        total = jax.tree.map(jnp.add, total, grads)
        return total, {"loss": value, **shares}, logprobs

    def imitation(
        self, base: Params, adapter: Params, total: Params, batch: ExampleBatch
    ) -> tuple[Params, Scalars]:
        """Adds the gradient of the examples' negative log-likelihood to `total`.

        Returns:
            The new total and the batch's share of the loss, in nats a token.
        """

        def loss(adapter: Params) -> Float[Array, ""]:
            model = self.policy.bind(base, adapter)
            hidden, _ = model(
                batch.tokens,
                batch.positions,
                attend=PackedAttention(batch.segments),
                remat=self.config.plan.remat,
            )
            logprobs, _ = self._head(base, hidden, batch.targets, IMITATION_TEMPERATURE)
            return weighted_sum(-logprobs, batch.weights)

        value, grads = jax.value_and_grad(loss)(adapter)
        return jax.tree.map(jnp.add, total, grads), {"loss": value}

    def apply(
        self, adapter: Params, state: optax.OptState, grads: Params
    ) -> tuple[Params, optax.OptState, Float[Array, ""]]:
        """One GRPO update; also returns the gradient's norm before clipping."""
        return _apply(self.optimizer, adapter, state, grads)

    def apply_imitation(
        self, adapter: Params, state: optax.OptState, grads: Params
    ) -> tuple[Params, optax.OptState, Float[Array, ""]]:
        """One supervised update; likewise."""
        return _apply(self.imitation_optimizer, adapter, state, grads)

    def _logprobs(
        self, base: Params, adapter: Params, tokens: Array, targets: Array, *, remat: bool
    ) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
        rows, seq = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(seq), (rows, seq))
        hidden, _ = self.policy.bind(base, adapter)(tokens, positions, remat=remat)
        return self._head(base, hidden, targets, self.config.rollout.temperature)

    def _head(
        self, base: Params, hidden: Array, targets: Array, temperature: float
    ) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
        local_rows = rows_per_device(hidden.shape[0], self.policy.mesh)
        return token_logprobs(
            hidden,
            targets,
            self.policy.embedding(base),
            softcap=self.policy.architecture.final_softcap,
            temperature=temperature,
            forbidden=self.vocabulary.forbidden_mask(self.policy.vocab_size),
            positions_at_once=max(1, self.config.plan.head_tokens // local_rows),
        )

    def compile(self) -> CompiledPrograms:
        """Compiles everything for the configured shapes; allocates nothing."""
        mesh = self.policy.mesh
        whole, rows = replicated(mesh), by_row(mesh)
        base, adapter = self.policy.abstract_params()
        score = jax.jit(self.score, out_shardings=rows)
        gradient = jax.jit(self.gradient, donate_argnums=2, out_shardings=(whole, whole, rows))
        apply = jax.jit(self.apply, donate_argnums=(0, 1), out_shardings=whole)
        batches = {seq: self._abstract_batch(seq) for seq in self.config.sequence_buckets}
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
            jax.eval_shape(self.optimizer.init, adapter),
        )
        imitation = apply_imitation = None
        if self.config.run.warm_start:
            imitate = jax.jit(self.imitation, donate_argnums=2, out_shardings=whole)
            examples = self._abstract_examples()
            imitation = build(imitate.trace(base, adapter, adapter, examples), mesh)
            apply_other = jax.jit(self.apply_imitation, donate_argnums=(0, 1), out_shardings=whole)
            apply_imitation = build(apply_other.trace(adapter, state, adapter), mesh)
        return CompiledPrograms(
            score={
                seq: build(score.trace(base, adapter, batch.tokens, batch.targets), mesh)
                for seq, batch in batches.items()
            },
            gradient={
                seq: build(gradient.trace(base, adapter, adapter, batch), mesh)
                for seq, batch in batches.items()
            },
            apply=build(apply.trace(adapter, state, adapter), mesh),
            imitation=imitation,
            apply_imitation=apply_imitation,
        )

    @property
    def keeps_old(self) -> bool:
        """Whether old log-probs must be scored: not while every batch is used once."""
        return self.config.learner.updates_per_batch > 1

    @property
    def keeps_reference(self) -> bool:
        """Whether the base's log-probs must be scored."""
        return self.config.learner.kl_coef > 0

    def _abstract_batch(self, seq: int) -> DeviceBatch:
        return DeviceBatch(
            tokens=self._rows(seq, dtype=jnp.int32),
            targets=self._rows(seq, dtype=jnp.int32),
            weights=self._rows(seq),
            advantages=self._rows(),
            old_logprobs=self._rows(seq) if self.keeps_old else None,
            reference_logprobs=self._rows(seq) if self.keeps_reference else None,
        )

    def _abstract_examples(self) -> ExampleBatch:
        seq = self.config.rollout.max_tokens
        return ExampleBatch(
            tokens=self._rows(seq, dtype=jnp.int32),
            targets=self._rows(seq, dtype=jnp.int32),
            weights=self._rows(seq),
            segments=self._rows(seq, dtype=jnp.int32),
            positions=self._rows(seq, dtype=jnp.int32),
        )

    def _rows(self, *shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(
            (self.config.plan.micro_batch_rows, *shape), dtype, sharding=by_row(self.policy.mesh)
        )


def _apply(
    optimizer: optax.GradientTransformation, adapter: Params, state: optax.OptState, grads: Params
) -> tuple[Params, optax.OptState, Float[Array, ""]]:
    updates, state = optimizer.update(grads, state, adapter)
    return optax.apply_updates(adapter, updates), state, optax.tree.norm(grads)
