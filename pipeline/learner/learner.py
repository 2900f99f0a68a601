"""The learner: adapter, optimizer state, and the updates on them: imitation, then GRPO.

What departs from the paper of GRPO (arXiv:2402.03300): log-probs of the policy that drew the
rollouts are the learner's own, never the sampler's; while each batch is used once they are the
current ones, so the ratio is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs.schema import Config
from pipeline.batching import TokenBatch, micro_batches
from pipeline.data.packing import Packed, packed_batches
from pipeline.datatypes import Completion, Rollout, RolloutName
from pipeline.learner.optimizer import grpo_rate, imitation_rate
from pipeline.learner.programs import PER_TOKEN, DeviceBatch, ExampleBatch, LearnerPrograms
from pipeline.model import lora
from pipeline.model.policy import Params, Policy
from pipeline.model.sharding import by_row, replicated
from pipeline.model.vocabulary import Vocabulary


@dataclass(frozen=True)
class LearnerState:
    """All that training changes.

    Attributes:
        adapter: float32 parameters.
        optimizer: optax state.
        version: steps learned from; the policy version.
        updates: optimizer updates made in this phase.
        reference: the adapter that the KL term pulls towards, which is the one at the beginning of
            the GRPO phase; None where that is the base itself or there is no KL term.
    """

    adapter: Params
    optimizer: optax.OptState
    version: int
    updates: int
    reference: Params | None = None


class Learner:
    """Compiled programs and the state they work on. Compiles once, when it is made.

    Args:
        policy: the model.
        base: its frozen parameters, shared, never copied or donated.
        config: the loss, the optimizer and the shapes.
        vocabulary: token ids with a meaning.
    """

    def __init__(
        self, policy: Policy, base: Params, config: Config, vocabulary: Vocabulary
    ) -> None:
        self.policy = policy
        self.base = base
        self._config = config
        self._vocabulary = vocabulary
        programs = LearnerPrograms(policy, config, vocabulary)
        self._programs = programs
        self._rates = {"sft": imitation_rate(config), "grpo": grpo_rate(config)}
        for rate in self._rates.values():
            rate(0)  # compiles the operations that it consists of
        self._compiled = programs.compile()
        self._zeros = policy.no_adapter()
        self._whole = replicated(policy.mesh)
        self.state = self._fresh()

    def _fresh(self) -> LearnerState:
        start = self._config.lora.start
        if start is None:
            adapter = self.policy.fresh_adapter(self._config.run.seed)
        else:
            from pipeline.model.adapter_source import load_adapter

            adapter = load_adapter(start, self.policy).adapter
        return self._begin_phase(adapter, version=0)

    def _begin_phase(self, adapter: Params, *, version: int) -> LearnerState:
        """The state in which a phase begins: a new optimizer, and this adapter as reference."""
        optimizer = jax.device_put(self._programs.optimizer.init(adapter), self._whole)
        moved = self._config.run.warm_start or self._config.lora.start is not None
        reference = None
        if self._programs.keeps_reference and moved:
            # A copy: updates take the adapter's own memory.
            reference = self.policy.place_adapter(jax.device_get(adapter))
        return LearnerState(adapter, optimizer, version=version, updates=0, reference=reference)

    @property
    def adapter_sha256(self) -> str:
        """Hash of the current adapter."""
        return lora.sha256(self.state.adapter)

    def host_adapter(self) -> dict[str, np.ndarray]:
        """The current adapter in host memory, for sending it elsewhere."""
        return jax.device_get(self.state.adapter)

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Learns from one step's rollouts and moves on to the next version.

        If no rollout carries a signal, adapter and optimizer stay as they are.

        Returns:
            Metrics: means over learned tokens, and the parity between sampler and learner.
        """
        batches = self._pack(rollouts, keep_zero_advantage=self._programs.keeps_reference)
        placed = [self._with_other_policies(self._place(batch)) for batch in batches]
        weight = float(sum(batch.weights.sum() for batch in batches))
        metrics = {"tokens_trained": float(sum(batch.num_tokens for batch in batches))}
        for number in range(self._config.learner.updates_per_batch if batches else 0):
            shares, logprobs = self._one_update(placed)
            if number == 0:
                metrics |= parity(batches, logprobs)
            # The loss is a sum over the whole step; what describes tokens is a mean over them.
            metrics |= {
                name: value / weight if name in PER_TOKEN else value
                for name, value in shares.items()
            }
        self.state = replace(self.state, version=self.state.version + 1)
        return metrics

    def imitate(self, sequences: Sequence[Packed]) -> dict[str, float]:
        """Learns from one step's packed examples and moves on to the next version.

        After the last step of the supervised phase the GRPO phase begins: with a new optimizer,
        and with the adapter as it is then for the KL term's reference.

        Returns:
            Metrics: the loss in nats a token, the gradient's norm, the learning rate.
        """
        program, apply = self._compiled.imitation, self._compiled.apply_imitation
        assert program is not None
        assert apply is not None
        batches = packed_batches(
            sequences,
            rows=self._config.plan.micro_batch_rows,
            length=self._config.rollout.max_tokens,
            pad=self._vocabulary.pad,
        )
        state = self.state
        total = jax.tree.map(jnp.zeros_like, state.adapter)
        shares = []
        for batch in batches:
            placed = ExampleBatch(**jax.device_put(vars(batch), by_row(self.policy.mesh)))
            total, share = program(self.base, state.adapter, total, placed)
            shares.append(share)
        adapter, optimizer, norm = apply(state.adapter, state.optimizer, total)
        version = state.version + 1
        self.state = replace(
            state, adapter=adapter, optimizer=optimizer, version=version, updates=state.updates + 1
        )
        if version == self._config.sft_steps:
            self.state = self._begin_phase(adapter, version=version)
        return {
            "loss": float(sum(share["loss"] for share in jax.device_get(shares))),
            "grad_norm": float(norm),
            "lr": float(self._rates["sft"](state.updates)),
            "tokens_trained": float(sum(batch.num_tokens for batch in batches)),
        }

    def score(
        self, completions: Sequence[Completion], *, adapter: Params, base: Params | None = None
    ) -> list[np.ndarray]:
        """Log-probs of each completion's tokens, float32, in the given order.

        Args:
            completions: what is scored; their names must differ.
            adapter: the adapter to score under.
            base: another base of the same shape; None: the learner's own.
        """
        rollouts = [Rollout(completion, "", {}, 0.0, 0.0) for completion in completions]
        scored: dict[RolloutName, np.ndarray] = {}
        for batch in self._pack(rollouts, keep_zero_advantage=True):
            logprobs = np.asarray(self._score(self._place(batch), adapter, base or self.base))
            for row, name in enumerate(batch.names):
                scored[name] = logprobs[row, batch.weights[row] > 0]
        return [scored[completion.name] for completion in completions]

    def _pack(self, rollouts: Sequence[Rollout], *, keep_zero_advantage: bool) -> list[TokenBatch]:
        return micro_batches(
            rollouts,
            rows=self._config.plan.micro_batch_rows,
            buckets=self._config.sequence_buckets,
            mode=self._config.learner.token_weights,
            pad=self._vocabulary.pad,
            keep_zero_advantage=keep_zero_advantage,
        )

    def _place(self, batch: TokenBatch) -> DeviceBatch:
        tokens, targets, weights, advantages = jax.device_put(
            (batch.tokens, batch.targets, batch.weights, batch.advantages),
            by_row(self.policy.mesh),
        )
        return DeviceBatch(tokens, targets, weights, advantages, None, None)

    def _score(self, batch: DeviceBatch, adapter: Params, base: Params) -> jax.Array:
        program = self._compiled.score[batch.tokens.shape[1]]
        return program(base, adapter, batch.tokens, batch.targets)

    def _with_other_policies(self, batch: DeviceBatch) -> DeviceBatch:
        """Adds the log-probs that stay the same during this step's updates."""
        adapter = self.state.adapter
        if self._programs.keeps_old:
            batch = replace(batch, old_logprobs=self._score(batch, adapter, self.base))
        if self._programs.keeps_reference:
            reference = self._zeros if self.state.reference is None else self.state.reference
            batch = replace(batch, reference_logprobs=self._score(batch, reference, self.base))
        return batch

    def _one_update(
        self, batches: Sequence[DeviceBatch]
    ) -> tuple[dict[str, float], list[jax.Array]]:
        """One pass over the step's batches and one optimizer update."""
        state = self.state
        total = jax.tree.map(jnp.zeros_like, state.adapter)
        shares, logprobs = [], []
        for batch in batches:
            program = self._compiled.gradient[batch.tokens.shape[1]]
            total, share, scored = program(self.base, state.adapter, total, batch)
            shares.append(share)
            logprobs.append(scored)
        adapter, optimizer, norm = self._compiled.apply(state.adapter, state.optimizer, total)
        self.state = replace(state, adapter=adapter, optimizer=optimizer, updates=state.updates + 1)
        # Added up on the host: sums of device scalars would be compiled at the first update.
        shares = jax.device_get(shares)
        sums = {name: float(sum(share[name] for share in shares)) for name in shares[0]}
        sums |= {"grad_norm": float(norm), "lr": float(self._rates["grpo"](state.updates))}
        return sums, logprobs


def parity(batches: Sequence[TokenBatch], logprobs: Sequence[jax.Array]) -> dict[str, float]:
    """|learner's - sampler's log-prob| over the learned tokens: mean, 99.9th percentile, max."""
    differences = np.concatenate(
        [
            np.abs(np.asarray(learned) - batch.sampled_logprobs)[batch.weights > 0]
            for batch, learned in zip(batches, logprobs, strict=True)
        ]
    )
    return {
        "parity_mean": float(differences.mean()),
        "parity_p999": float(np.quantile(differences, 0.999)),
        "parity_max": float(differences.max()),
    }
