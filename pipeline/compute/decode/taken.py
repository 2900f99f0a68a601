"""What a rollout has drawn when it leaves its slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.contracts.rollouts import Completion, RolloutRequest, StopReason


@dataclass(frozen=True)
class Taken:
    """What `Completion` says of the drawing itself.

    Attributes:
        tokens: `[length]`, int32.
        logprobs: `[length]`, float32, under the whole distribution.
        processed_logprobs: likewise, under what was drawn from; None where that is the same.
        stop_reason: why it left.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    processed_logprobs: np.ndarray | None
    stop_reason: StopReason

    @staticmethod
    def before(request: RolloutRequest, *, truncated: bool) -> Taken:
        """What there is of a rollout that was not let into any slot."""
        begun, nothing = request.begun, np.zeros(0, np.float32)
        if begun is None:
            tokens = np.zeros(0, np.int32)
            return Taken(tokens, nothing, nothing if truncated else None, "cut")
        return Taken(begun.tokens, begun.logprobs, begun.processed_logprobs, "cut")

    def put_before(self, begun: Completion) -> None:
        """Writes what was drawn before it was cut into its places, where a slot holds nothing."""
        size = len(begun.tokens)
        self.tokens[:size], self.logprobs[:size] = begun.tokens, begun.logprobs
        if self.processed_logprobs is not None:
            self.processed_logprobs[:size] = begun.processed_logprobs
