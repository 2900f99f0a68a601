"""Scoring of completions without training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from configs.schema import Config
from pipeline.compute.learner.batches import place_inputs
from pipeline.compute.learner.programs import Compiled, LearnerPrograms
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.data.batching import batches_to_score
from pipeline.data.packed_batch import BatchShape
from pipeline.types import Completion, RolloutName


class Scorer:
    """The learner's scoring program, compiled once for each size of a micro-batch.

    Args:
        policy: the model.
        config: shapes and temperature.
        vocabulary: special token ids.
    """

    def __init__(self, policy: Policy, config: Config, vocabulary: Vocabulary) -> None:
        programs = LearnerPrograms(policy, config, vocabulary)
        self._mesh, self._shape = policy.mesh, programs.shape
        self._compiled = programs.compile_score()

    def score(
        self, completions: Sequence[Completion], *, adapter: Params, base: Params
    ) -> list[np.ndarray]:
        """Log-probs of each completion's tokens, float32, in the given order."""
        return score_completions(
            completions, self._compiled, (base, adapter), shape=self._shape, mesh=self._mesh
        )


def score_completions(
    completions: Sequence[Completion],
    programs: Compiled,
    weights: tuple[Params, Params],
    *,
    shape: BatchShape,
    mesh: Mesh,
) -> list[np.ndarray]:
    """Log-probs of each completion's tokens, float32, in the given order.

    Args:
        completions: completions with distinct names.
        programs: `score` for each number of rows.
        weights: base and adapter.
        shape: sizes of micro-batches.
        mesh: mesh of the micro-batches.
    """
    scored: dict[RolloutName, np.ndarray] = {}
    for batch in batches_to_score(completions, shape=shape):
        program = programs[f"score {len(batch.tokens)}"]
        logprobs = np.asarray(program(*weights, place_inputs(batch, mesh)))
        scored |= {name: logprobs[at.row, at.positions] for name, at in batch.completions.items()}
    return [scored[completion.name] for completion in completions]
