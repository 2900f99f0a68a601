"""The nouns of the pipeline, in the order in which they come to be.

    Prompt -> RolloutName -> RolloutRequest -> Completion -> Rollout -> TokenBatch
    Example -> (packed) PackedBatch

Frozen dataclasses of numpy arrays, strings and ints: they cross process boundaries as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

StopReason = Literal["eos", "stop_string", "length", "cut"]
"""By a stop token, by a text of `rollout.stop_strings`, or where no more was allowed; "cut": it has
not ended, the step's sampling has (`rollout.partial`)."""

Phase = str
"""`train`, `validation`, `test`, `probe`, or the name of one of `eval.sets`."""


@dataclass(frozen=True)
class Prompt:
    """A dataset row as the model sees it.

    Attributes:
        id: position of the row in its dataset file or split, and which source of a mixture it is
            from; unique within a split.
        text: the rendered prompt, turn tokens included, without the leading <bos> and
            `prompt.answer_prefix`.
        tokens: int32 `seq`, <bos> first, the prefix last.
        answer: the reference answer.
        row: the row's columns, for reward functions that want more.
        source: name of its dataset in a mixture; None: there is no mixture.
    """

    id: int
    text: str
    tokens: np.ndarray
    answer: str
    row: Mapping[str, object]
    source: str | None = None


@dataclass(frozen=True)
class Demonstration:
    """A worked example of the supervised phase.

    Attributes:
        id: position of the row in its dataset file or split; unique.
        prompt_tokens: int32 `prompt`, as those of a `Prompt`.
        completion_tokens: int32 `seq`, what comes behind `prompt.answer_prefix`; the last one is a
            stop token, which is learned too.
    """

    id: int
    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray

    def __len__(self) -> int:
        """Tokens in all."""
        return len(self.prompt_tokens) + len(self.completion_tokens)


@dataclass(frozen=True, order=True)
class RolloutName:
    """What a rollout is called; its sampling noise is a function of this and nothing else.

    The step is the one that asked for it first, also where later ones go on with it.
    """

    phase: Phase
    step: int
    prompt_id: int
    sample: int

    @property
    def group(self) -> RolloutName:
        """The name of the group's first rollout, which all of the group share."""
        return replace(self, sample=0)

    def key(self, seed: int) -> np.ndarray:
        """The rollout's random key: uint32 `2`, the head of BLAKE2b over seed and name."""
        name = f"{seed}/{self.phase}/{self.step}/{self.prompt_id}/{self.sample}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return np.frombuffer(digest, dtype="<u4").astype(np.uint32)


@dataclass(frozen=True)
class RolloutRequest:
    """A rollout to be drawn.

    Attributes:
        name: what it will be called.
        prompt_tokens: int32 `seq`.
        max_new_tokens: it ends here at the latest; None: at `rollout.max_new_tokens`, which is the
            most there may be. Tokens of `begun` count.
        begun: what came back cut when it was asked for the last time; None: it is new.
        hold: it keeps its slot for as many segments as the longest completion takes, though it has
            ended, and no stop string ends it; for measurements, which must not depend on what is
            drawn: a slot costs the same whether anybody draws in it or not.
    """

    name: RolloutName
    prompt_tokens: np.ndarray
    max_new_tokens: int | None = None
    begun: Completion | None = None
    hold: bool = False

    @property
    def num_begun(self) -> int:
        """Tokens that were drawn before."""
        return 0 if self.begun is None else len(self.begun.tokens)

    @property
    def read_tokens(self) -> np.ndarray:
        """What is read before anything is drawn: int32 `prompt + begun`."""
        if self.begun is None:
            return self.prompt_tokens
        return np.concatenate([self.prompt_tokens, self.begun.tokens])


@dataclass(frozen=True)
class VersionSpan:
    """Tokens of a rollout that one policy version drew, one behind the other.

    Attributes:
        version: policy version.
        adapter_sha256: hash of that version's adapter.
        tokens: how many, at least one.
    """

    version: int
    adapter_sha256: str
    tokens: int


@dataclass(frozen=True)
class Completion:
    """A drawn rollout.

    Attributes:
        name: which rollout this is.
        prompt_tokens: int32 `prompt`.
        tokens: int32 `seq`, the stop token included when `stop_reason` is "eos"; the last one
            completes the text when it is "stop_string".
        logprobs: float32 `seq`, of each token under the full temperature-scaled distribution of the
            version that drew it.
        stop_reason: why it ended.
        version: policy version that drew it; where it was cut and continued, the last one.
        adapter_sha256: hash of that version's adapter.
        processed_logprobs: float32 `seq`, under the distribution it was drawn from: renormalised
            over what could be drawn; None: nothing was cut, `logprobs` is it.
        begun: what earlier versions drew of it, its first tokens.
    """

    name: RolloutName
    prompt_tokens: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: StopReason
    version: int
    adapter_sha256: str
    processed_logprobs: np.ndarray | None = None
    begun: tuple[VersionSpan, ...] = ()

    @property
    def num_new(self) -> int:
        """Tokens that its own version drew."""
        return len(self.tokens) - sum(stretch.tokens for stretch in self.begun)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which version drew which tokens, in their order."""
        if not self.num_new:
            return self.begun
        return (*self.begun, VersionSpan(self.version, self.adapter_sha256, self.num_new))

    @property
    def versions(self) -> np.ndarray:
        """The policy version that drew each token: int32 `seq`."""
        versions = [stretch.version for stretch in self.version_spans]
        counts = [stretch.tokens for stretch in self.version_spans]
        return np.repeat(np.array(versions, np.int32), counts)


@dataclass
class DecodeWork:
    """What was computed to draw a number of tokens; an account that is added to.

    Attributes:
        segments: decode segments, by slots.
        slot_steps: steps of a slot in them, whether anybody was in it or not.
        tokens: tokens that were drawn and kept.
        prompt_tokens: positions that were prefilled, padding included.
    """

    segments: dict[int, int] = field(default_factory=dict)
    slot_steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0

    @property
    def useful(self) -> float:
        """Share of the slot steps that drew a token."""
        return self.tokens / max(1, self.slot_steps)

    @property
    def metrics(self) -> dict[str, float]:
        """What W&B and the run folder are told."""
        return {
            "rollout/slots_useful": self.useful,
            "rollout/prompt_positions": float(self.prompt_tokens),
        }

    def add(self, other: DecodeWork) -> None:
        """Adds what somebody else has computed."""
        for size, count in other.segments.items():
            self.segments[size] = self.segments.get(size, 0) + count
        self.slot_steps += other.slot_steps
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens


@dataclass(frozen=True)
class Rollout:
    """A completion with its text and scores.

    Attributes:
        completion: what was drawn.
        text: `prompt.answer_prefix` and the completion's tokens as text, without stop tokens.
        rewards: score of each part, None where the reward function failed.
        reward: weighted sum, None if any part failed; such a rollout is excluded from learning.
        advantage: 0 where there is no reward or the group carries no signal.
        source: name of the prompt's dataset in a mixture; None: there is no mixture.
    """

    completion: Completion
    text: str
    rewards: Mapping[str, float | None]
    reward: float | None
    advantage: float
    source: str | None = None
