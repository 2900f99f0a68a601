"""Scores completions and does nothing else: for looking at a model that is not trained here."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from configs.schema import Config
from pipeline.batching import micro_batches
from pipeline.datatypes import Completion, Rollout, RolloutName
from pipeline.learner.programs import LearnerPrograms
from pipeline.model.policy import Params, Policy
from pipeline.model.sharding import build, by_row
from pipeline.model.vocabulary import Vocabulary


class Scorer:
    """The learner's scoring program, compiled once for each of the run's sequence lengths.

    Args:
        policy: the model.
        config: shapes and temperature.
        vocabulary: token ids with a meaning.
    """

    def __init__(self, policy: Policy, config: Config, vocabulary: Vocabulary) -> None:
        self._config, self._pad = config, vocabulary.pad
        self._rows = by_row(policy.mesh)
        program = jax.jit(
            LearnerPrograms(policy, config, vocabulary).score, out_shardings=self._rows
        )
        base, adapter = policy.abstract_params()
        self._compiled = {}
        for seq in config.sequence_buckets:
            shape = (config.plan.micro_batch_rows, seq)
            tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=self._rows)
            traced = program.trace(base, adapter, tokens, tokens)
            self._compiled[seq] = build(traced, policy.mesh)

    def score(
        self, completions: Sequence[Completion], *, adapter: Params, base: Params
    ) -> list[np.ndarray]:
        """Log-probs of each completion's tokens, float32, in the given order."""
        batches = micro_batches(
            [Rollout(completion, "", {}, 0.0, 0.0) for completion in completions],
            rows=self._config.plan.micro_batch_rows,
            buckets=self._config.sequence_buckets,
            mode=self._config.learner.token_weights,
            pad=self._pad,
            keep_zero_advantage=True,
        )
        scored: dict[RolloutName, np.ndarray] = {}
        for batch in batches:
            tokens, targets = jax.device_put((batch.tokens, batch.targets), self._rows)
            program = self._compiled[batch.tokens.shape[1]]
            logprobs = np.asarray(program(base, adapter, tokens, targets))
            for row, name in enumerate(batch.names):
                scored[name] = logprobs[row, batch.weights[row] > 0]
        return [scored[completion.name] for completion in completions]
