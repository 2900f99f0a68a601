"""Progress of a run: the counters and the sampling state that a checkpoint carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from pipeline.types import Completion, RolloutName, Segment

_ARRAYS = {"tokens": np.int32, "logprobs": np.float32, "processed_logprobs": np.float32}


def _completion_json(completion: Completion) -> dict[str, Any]:
    """JSON; a float32 has as many digits as restore its value exactly."""
    return {
        "name": asdict(completion.name),
        "prompt_tokens": completion.prompt_tokens.tolist(),
        "segments": [_segment_json(segment) for segment in completion.segments],
        "stop_reason": completion.stop_reason,
    }


def _segment_json(segment: Segment) -> dict[str, Any]:
    arrays = {name: getattr(segment, name) for name in _ARRAYS}
    return {
        **vars(segment),
        **{name: None if array is None else array.tolist() for name, array in arrays.items()},
    }


def _completion(row: Mapping[str, Any]) -> Completion:
    segments = []
    for found in row["segments"]:
        arrays = {
            name: None if found[name] is None else np.array(found[name], dtype)
            for name, dtype in _ARRAYS.items()
        }
        segments.append(Segment(**{**found, **arrays}))
    return Completion(
        name=RolloutName(**row["name"]),
        prompt_tokens=np.array(row["prompt_tokens"], np.int32),
        segments=tuple(segments),
        stop_reason=row["stop_reason"],
    )


@dataclass(frozen=True)
class SamplingState:
    """What the sampling of a step depends on, besides seed, step and policy.

    Attributes:
        partial: whole groups of earlier steps with at least one truncated rollout, which this step
            continues; oldest first.
        prompts_sampled: prompts that earlier steps sampled.
    """

    partial: tuple[Completion, ...] = ()
    prompts_sampled: int = 0


@dataclass(frozen=True)
class Progress:
    """Counters of a run.

    Attributes:
        step: training steps done; the policy version.
        samples: finished training rollouts.
        tokens_generated: tokens generated for training, those of truncated rollouts included.
        tokens_trained: tokens in the loss.
        tokens_padded: padding positions that the learner computed.
        reward_errors: reward calls without a value.
        skipped_updates: updates skipped because loss or gradient were not finite.
        skipped_in_a_row: consecutive skipped updates up to now.
        truncated: rollouts truncated at the cut-off of a step.
        continued: truncated rollouts that a later step continued.
        dropped: truncated rollouts that were discarded.
        unused: with dynamic sampling, rollouts that were sampled and not trained on.
        sampling: state of the sampling.
    """

    step: int = 0
    samples: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_padded: int = 0
    reward_errors: int = 0
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    truncated: int = 0
    continued: int = 0
    dropped: int = 0
    unused: int = 0
    sampling: SamplingState = field(default_factory=SamplingState)

    def to_meta(self) -> dict[str, Any]:
        """The content of a checkpoint's metadata: JSON."""
        state = self.sampling
        sampling = {
            "partial": [_completion_json(one) for one in state.partial],
            "prompts_sampled": state.prompts_sampled,
        }
        return {**vars(self), "sampling": sampling}

    @staticmethod
    def of_meta(meta: Mapping[str, Any]) -> Progress:
        """Reads the result of `to_meta`; ignores other keys."""
        names = set(Progress.__dataclass_fields__)
        found = {name: value for name, value in meta.items() if name in names}
        sampling = meta["sampling"]
        state = SamplingState(
            tuple(_completion(row) for row in sampling["partial"]), sampling["prompts_sampled"]
        )
        return Progress(**{**found, "sampling": state})

    def counts(self) -> dict[str, Any]:
        """The counters for `summary.json`."""
        return {
            "steps": self.step,
            "samples": self.samples,
            "tokens_generated": self.tokens_generated,
            "tokens_trained": self.tokens_trained,
            "tokens_padded": self.tokens_padded,
            "rollouts": {
                "truncated": self.truncated,
                "continued": self.continued,
                "dropped": self.dropped,
                "unused": self.unused,
            },
        }

    def after_update(self, metrics: Mapping[str, float]) -> Progress:
        """Adds the counters of an update with these metrics; `step` stays."""
        trained, skipped = int(metrics["tokens_trained"]), int(metrics.get("skipped_updates", 0))
        # Where tokens were trained on, an update was made before the one that was skipped.
        in_a_row = (0 if trained else self.skipped_in_a_row) + skipped
        return replace(
            self,
            tokens_trained=self.tokens_trained + trained,
            tokens_padded=self.tokens_padded + int(metrics["tokens_padded"]),
            skipped_updates=self.skipped_updates + skipped,
            skipped_in_a_row=in_a_row,
        )
