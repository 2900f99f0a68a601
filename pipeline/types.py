"""Values that the parts of the pipeline pass on, in the order of the data flow.

    Prompt -> RolloutName -> RolloutRequest -> Completion -> Rollout -> TokenBatch
    Demonstration -> PackedBatch

Frozen dataclasses of NumPy arrays, strings and ints; they cross process boundaries unchanged. The
batches are in `pipeline.data.packed_batch`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rewards.base import RewardError, RewardInput, Tags

StopReason = Literal["eos", "stop_string", "length", "truncated"]
"""`eos`: a stop token; `stop_string`: one of `rollout.stop_strings`; `length`: the token limit;
`truncated`: the step's sampling ended before the rollout did (`rollout.partial`)."""

RolloutPhase = str
"""`train`, `validation`, `test`, `probe`, or the name of one of `eval.sets`."""


@dataclass(frozen=True)
class Prompt:
    """A dataset row rendered for the model.

    Attributes:
        id: position of the row in its dataset file or split, combined with its source in a
            mixture; unique within a split.
        text: the rendered prompt, turn tokens included, without the leading <bos> and
            `prompt.answer_prefix`.
        tokens: int32 `seq`, <bos> first, the prefix last.
        answer: the reference answer; None if the dataset has none.
        row: the row's columns, for reward functions that need more than the answer.
        source: name of its dataset in a mixture; None without a mixture.
        messages: the turns of a row in chat format; None for other rows.
    """

    id: int
    text: str
    tokens: np.ndarray
    answer: str | None
    row: Mapping[str, object]
    source: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None

    def reward_input(self, completion: str, *, stop_reason: StopReason, tags: Tags) -> RewardInput:
        """What reward functions are given for a completion of the prompt."""
        return RewardInput(
            prompt=self.text,
            completion=completion,
            stop_reason=stop_reason,
            answer=self.answer,
            row=self.row,
            tags=tags,
            source=self.source,
            messages=self.messages,
            prompt_id=self.id,
        )


@dataclass(frozen=True)
class Demonstration:
    """A prompt and its target completion for the SFT phase.

    Attributes:
        id: position of the row in its dataset file or split; unique.
        prompt_tokens: int32 `prompt`, as in `Prompt.tokens`.
        completion_tokens: int32 `seq`, the tokens after `prompt.answer_prefix`; the last one is a
            stop token, which is also trained on.
    """

    id: int
    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray

    def __len__(self) -> int:
        """Number of tokens, prompt and completion."""
        return len(self.prompt_tokens) + len(self.completion_tokens)


@dataclass(frozen=True, order=True)
class RolloutName:
    """Identity of a rollout; its sampling noise is a function of the run's seed and this name.

    `step` is the step that started the rollout, also when later steps continue it.
    """

    phase: RolloutPhase
    step: int
    prompt_id: int
    sample: int

    @property
    def group(self) -> RolloutName:
        """Name of the group's first rollout, the same for all rollouts of a group."""
        return replace(self, sample=0)

    def key(self, seed: int) -> np.ndarray:
        """RNG key of the rollout: uint32 `2`, the first bytes of BLAKE2b over seed and name."""
        name = f"{seed}/{self.phase}/{self.step}/{self.prompt_id}/{self.sample}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return np.frombuffer(digest, dtype="<u4").astype(np.uint32)


@dataclass(frozen=True)
class RolloutRequest:
    """A request to sample one rollout.

    Attributes:
        name: identity of the rollout.
        prompt_tokens: int32 `seq`.
        max_new_tokens: limit of the completion's length, tokens of `partial` included; None:
            `rollout.max_new_tokens`, which is also the maximum.
        partial: the truncated completion that this request continues; None: a new rollout.
    """

    name: RolloutName
    prompt_tokens: np.ndarray
    max_new_tokens: int | None = None
    partial: Completion | None = None

    @property
    def num_partial(self) -> int:
        """Number of completion tokens that earlier requests sampled."""
        return 0 if self.partial is None else len(self.partial.tokens)

    @property
    def prefill_tokens(self) -> np.ndarray:
        """Tokens that are read before sampling: int32 `prompt + partial`."""
        if self.partial is None:
            return self.prompt_tokens
        return np.concatenate([self.prompt_tokens, self.partial.tokens])


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a completion that one policy version sampled.

    Attributes:
        tokens: int32 `n`.
        logprobs: float32 `n`, of each token under the full temperature-scaled distribution.
        version: policy version.
        adapter_sha256: hash of that version's adapter.
        processed_logprobs: float32 `n`, under the distribution that was sampled from, renormalised
            after top-k, top-p and min-p; None: equal to `logprobs`.
        loss_weight: factor of the tokens' weight in the loss.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    version: int
    adapter_sha256: str
    processed_logprobs: np.ndarray | None = None
    loss_weight: float = 1.0


@dataclass(frozen=True)
class Completion:
    """The tokens of a rollout after its prompt, in segments.

    Attributes:
        name: identity of the rollout.
        prompt_tokens: int32 `prompt`.
        segments: at least one, in token order. A rollout that was truncated and continued has one
            for each time; the last one is empty if nothing was sampled this time.
        stop_reason: why sampling ended. The stop token is the last one if it is "eos"; the last
            token completes the stop string if it is "stop_string".
    """

    name: RolloutName
    prompt_tokens: np.ndarray
    segments: tuple[Segment, ...]
    stop_reason: StopReason

    @property
    def tokens(self) -> np.ndarray:
        """All tokens: int32 `seq`."""
        return np.concatenate([segment.tokens for segment in self.segments])

    @property
    def logprobs(self) -> np.ndarray:
        """`Segment.logprobs` of all tokens: float32 `seq`."""
        return np.concatenate([segment.logprobs for segment in self.segments])

    @property
    def processed_logprobs(self) -> np.ndarray | None:
        """`Segment.processed_logprobs` of all tokens: float32 `seq`; None if no segment has any."""
        if all(segment.processed_logprobs is None for segment in self.segments):
            return None
        found = ((one.processed_logprobs, one.logprobs) for one in self.segments)
        return np.concatenate([full if own is None else own for own, full in found])

    @property
    def loss_weights(self) -> np.ndarray:
        """`Segment.loss_weight` of each token: float32 `seq`."""
        return self._by_token([segment.loss_weight for segment in self.segments], np.float32)

    @property
    def versions(self) -> np.ndarray:
        """Policy version that sampled each token: int32 `seq`."""
        return self._by_token([segment.version for segment in self.segments], np.int32)

    @property
    def version(self) -> int:
        """Policy version of the last segment."""
        return self.segments[-1].version

    @property
    def adapter_sha256(self) -> str:
        """Hash of the adapter of the last segment."""
        return self.segments[-1].adapter_sha256

    @property
    def num_new(self) -> int:
        """Number of tokens of the last segment."""
        return len(self.segments[-1].tokens)

    def _by_token(self, values: Sequence[float], dtype: type) -> np.ndarray:
        return np.repeat(np.array(values, dtype), [len(one.tokens) for one in self.segments])


Report = Callable[[Sequence[Completion]], None]
"""Receives rollouts that have ended."""


@dataclass
class DecodeWork:
    """Counters of the sampler's work.

    Attributes:
        segments: number of decode segments, by number of slots.
        slot_steps: decode steps x slots, empty slots included.
        tokens: sampled tokens that were kept.
        prompt_tokens: prefilled positions, padding included.
    """

    segments: dict[int, int] = field(default_factory=dict)
    slot_steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Kept tokens, also as a share of the slot steps, and the prefilled positions."""
        return {
            "tokens/generated": float(self.tokens),
            "rollout/slots_useful": self.tokens / max(1, self.slot_steps),
            "rollout/prompt_positions": float(self.prompt_tokens),
        }

    def add(self, other: DecodeWork) -> None:
        """Adds the counters of another sampler."""
        for size, count in other.segments.items():
            self.segments[size] = self.segments.get(size, 0) + count
        self.slot_steps += other.slot_steps
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens


NO_TEXT = RewardInput("", "", "eos", None, {}, Tags("", "", "", ""))
"""Input of the rollouts of measurements, which are not scored."""


@dataclass(frozen=True)
class Rollout:
    """A completion with its text and scores.

    Attributes:
        completion: the sampled tokens.
        given: what the reward functions were given: texts, reference answer, the dataset's row.
        rewards: score of each part, None where it failed or does not apply; numbers that a part
            returned by name follow it as `part/name`.
        reward: weighted sum, None if the rollout is excluded from training.
        advantage: 0 if there is no reward or the group carries no signal.
        errors: why parts failed, by name.
        excluded: why there is no reward: the cause of an error, "not_applicable" if no weighted
            part applies, "group" if another rollout of the group failed; None if there is one.
    """

    completion: Completion
    given: RewardInput
    rewards: Mapping[str, float | None]
    reward: float | None
    advantage: float
    errors: Mapping[str, RewardError] = field(default_factory=dict)
    excluded: str | None = None

    @property
    def text(self) -> str:
        """`prompt.answer_prefix` and the completion's tokens as text, without stop tokens."""
        return self.given.completion

    @property
    def source(self) -> str | None:
        """Name of the prompt's dataset in a mixture; None without a mixture."""
        return self.given.source


AdapterRef = Literal["current", "previous", "initial", "probe", "best"]
"""An adapter of the learner: the current version, the previous version (with `rollout.ahead`), the
initial adapter of the run, a random adapter for the probe, or the best version by validation."""


@dataclass(frozen=True)
class Published:
    """An adapter that the learner publishes to the samplers.

    Attributes:
        version: policy version.
        sha256: hash of the adapter.
        payload: the adapter in the transport's format; opaque to the coordinator.
    """

    version: int
    sha256: str
    payload: object


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter that a sampler has loaded from a file.

    Attributes:
        version: policy version; 0 is the base.
        sha256: hash of the adapter on the devices.
        what: description of the adapter and its origin.
    """

    version: int
    sha256: str
    what: str


@dataclass(frozen=True)
class Restored:
    """Result of restoring a checkpoint at the learner's start.

    Attributes:
        meta: the coordinator's data in the checkpoint; None if there was no checkpoint.
        where: the checkpoint folder and its host.
    """

    meta: Mapping[str, Any] | None
    where: str = ""


@dataclass(frozen=True)
class ExportReport:
    """A verified export.

    Attributes:
        folder: path of the export.
        mean_difference: mean log-prob difference to the policy over `tokens` tokens; None if
            device memory was too small for scoring, so that weights were compared instead.
        tokens: number of compared tokens.
        version: the policy version that was exported.
    """

    folder: str
    mean_difference: float | None
    tokens: int
    version: int


TrainingPhase = Literal["sft", "grpo"]
"""A training phase of the run."""

ShowProgress = Callable[[int, int], None]
"""Takes how much is done, and of how much."""


@dataclass(frozen=True)
class TrainStep:
    """A training step that is about to start.

    Attributes:
        number: counted from 0; also the policy version that samples.
        prompts: of this step; fewer than configured where time is short.
        phase: supervised or GRPO.
        rate: learning rate, where it decays with the time used; None: the learner's schedule.
        deadline: when sampling and scoring are abandoned, in seconds on the run's clock; None:
            never.
    """

    number: int
    prompts: int
    phase: TrainingPhase = "grpo"
    rate: float | None = None
    deadline: float | None = None
